//! The fake driver reports what the documentation forbids.

use std::ffi::{c_char, c_int, c_void};
use std::ptr::{null, null_mut};

use candle_core::DType;
use cudarc::cublaslt::{result, sys as lt};
use cudarc::driver::sys::{self, CUresult, CUresult::*};

use super::told;
use crate::cuda::launch::Matrix;
use crate::cuda::{Architecture, Cache, Device, Family, Launch, Nvidia, Nvrtc, Product};

/// The beginnings of the expected reports, in the order of [`break_rules`].
const TOLD: [&str; 23] = [
    "cuDevicePrimaryCtxRetain: before cuInit",
    "cuMemGetInfo: no context is current to the thread",
    "cuCtxSetCurrent: 0x10 is no context",
    "cuMemCreate: 1000 bytes are no multiple",
    "cuMemMap: 0x200000 is not reserved",
    "cuMemcpyHtoDAsync: ",
    "cuMemcpyHtoDAsync: ",
    "cuMemUnmap: ",
    "cuMemAddressFree: memory is still mapped there",
    "cuModuleLoadData: not compiled by the double of NVRTC",
    "cuStreamBeginCapture: it captures already",
    "cuMemcpyDtoH: while a stream captures",
    "cuStreamSynchronize: the stream captures",
    "cuStreamEndCapture: it does not capture",
    "cuGraphLaunch: 0x20 is no executable graph",
    "cuMemHostGetDevicePointer: ",
    "cublasLtMatmulDescSetAttribute: attribute 7 has 4 bytes, not 8",
    "cublasLtMatmulDescDestroy: ",
    "cuMemRelease: ",
    "cuStreamDestroy: ",
    "cuMemFreeHost: 0x30 was not allocated",
    "cuDevicePrimaryCtxRelease: it is not retained",
    "cuBLASLt: what it keeps for the process was in a context that is over",
];

#[test]
fn broken_rules_are_told() {
    let Some(told) = told(module_path!(), "broken_rules_are_told", break_rules) else { return };
    assert_eq!(told.len(), TOLD.len(), "{told:#?}");
    for (line, expected) in told.iter().zip(TOLD) {
        assert!(line.starts_with(expected), "{line}, not {expected}");
    }
}

fn break_rules() {
    let expect = |got: CUresult, expected: CUresult| assert_eq!(got, expected);
    let well = |got| expect(got, CUDA_SUCCESS);
    let (mut context, mut stream, mut graph) = (null_mut(), null_mut(), null_mut());
    let (mut handle, mut address, mut mapped, mut free, mut total) = (0, 0, 0, 0, 0);
    let page = 2 << 20;
    let bytes = [0u8; 16];
    let location = sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: 0 };
    let access = sys::CUmemAccessDesc { location, flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
    let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
    // SAFETY: the fake driver detects each broken rule before it accesses any memory.
    unsafe {
        let mut kind: sys::CUmemAllocationProp = std::mem::zeroed();
        kind.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        kind.location = location;

        expect(sys::cuDevicePrimaryCtxRetain(&mut context, 0), CUDA_ERROR_NOT_INITIALIZED);
        well(sys::cuInit(0));
        well(sys::cuDevicePrimaryCtxRetain(&mut context, 0));
        expect(sys::cuMemGetInfo_v2(&mut free, &mut total), CUDA_ERROR_INVALID_CONTEXT);
        expect(sys::cuCtxSetCurrent(0x10 as _), CUDA_ERROR_INVALID_CONTEXT);
        well(sys::cuCtxSetCurrent(context));
        well(sys::cuStreamCreate(&mut stream, 1));

        expect(sys::cuMemCreate(&mut handle, 1000, &kind, 0), CUDA_ERROR_INVALID_VALUE);
        well(sys::cuMemCreate(&mut handle, page, &kind, 0));
        expect(sys::cuMemMap(page as u64, page, 0, handle, 0), CUDA_ERROR_INVALID_VALUE);
        well(sys::cuMemAddressReserve(&mut address, page, 0, 0, 0));
        well(sys::cuMemMap(address, page, 0, handle, 0));
        let copy = |to| sys::cuMemcpyHtoDAsync_v2(to, bytes.as_ptr().cast(), bytes.len(), stream);
        expect(copy(address), CUDA_ERROR_INVALID_VALUE);
        well(sys::cuMemSetAccess(address, page, &access, 1));
        well(copy(address));
        expect(copy(address + page as u64 - 8), CUDA_ERROR_INVALID_VALUE);
        expect(sys::cuMemUnmap(address, page / 2), CUDA_ERROR_INVALID_VALUE);
        expect(sys::cuMemAddressFree(address, page), CUDA_ERROR_INVALID_VALUE);

        let mut module = null_mut();
        expect(sys::cuModuleLoadData(&mut module, bytes.as_ptr().cast()), CUDA_ERROR_INVALID_IMAGE);
        well(sys::cuStreamBeginCapture_v2(stream, mode));
        expect(sys::cuStreamBeginCapture_v2(stream, mode), CUDA_ERROR_INVALID_VALUE);
        let mut back = [0u8; 16];
        let read = sys::cuMemcpyDtoH_v2(back.as_mut_ptr().cast(), address, back.len());
        expect(read, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
        expect(sys::cuStreamSynchronize(stream), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
        expect(sys::cuStreamEndCapture(stream, &mut graph), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
        assert_eq!(graph.cast_const(), null());
        expect(sys::cuStreamEndCapture(stream, &mut graph), CUDA_ERROR_INVALID_VALUE);
        expect(sys::cuGraphLaunch(0x20 as _, stream), CUDA_ERROR_INVALID_VALUE);

        let mut memory = null_mut();
        well(sys::cuMemHostAlloc(&mut memory, 16, sys::CU_MEMHOSTALLOC_PORTABLE));
        expect(sys::cuMemHostGetDevicePointer_v2(&mut mapped, memory, 0), CUDA_ERROR_INVALID_VALUE);
        well(sys::cuMemFreeHost(memory));

        let blas = result::create_handle().unwrap();
        result::destroy_handle(blas).unwrap();
        let (compute, scale) = (lt::cublasComputeType_t::CUBLAS_COMPUTE_32F, lt::cudaDataType_t::CUDA_R_32F);
        let operation = result::create_matmul_desc(compute, scale).unwrap();
        let attribute = lt::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_EPILOGUE;
        result::set_matmul_desc_attribute(operation, attribute, bytes.as_ptr().cast(), 8).unwrap_err();
        result::destroy_matmul_desc(operation).unwrap();
        result::destroy_matmul_desc(operation).unwrap_err();

        well(sys::cuStreamSynchronize(stream));
        well(sys::cuMemUnmap(address, page));
        well(sys::cuMemRelease(handle));
        expect(sys::cuMemRelease(handle), CUDA_ERROR_INVALID_VALUE);
        well(sys::cuMemAddressFree(address, page));
        well(sys::cuStreamDestroy_v2(stream));
        expect(sys::cuStreamDestroy_v2(stream), CUDA_ERROR_INVALID_HANDLE);
        expect(sys::cuMemFreeHost(0x30 as _), CUDA_ERROR_INVALID_VALUE);
        well(sys::cuDevicePrimaryCtxRelease_v2(0));
        expect(sys::cuDevicePrimaryCtxRelease_v2(0), CUDA_ERROR_INVALID_CONTEXT);

        // A new context after the first one is destroyed.
        well(sys::cuDevicePrimaryCtxRetain(&mut context, 0));
        well(sys::cuCtxSetCurrent(context));
        let blas = result::create_handle().unwrap();
        result::destroy_handle(blas).unwrap();
        well(sys::cuDevicePrimaryCtxRelease_v2(0));
    }
}

/// Launches a function for the first time, so that its code would be loaded, while a stream captures.
#[test]
fn late_loads_are_told() {
    let Some(told) = told(module_path!(), "late_loads_are_told", load_late) else { return };
    assert_eq!(told.len(), 1, "{told:#?}");
    assert!(
        told[0].starts_with("cuLaunchKernel: scaled_sum_f32: would be loaded while the stream captures"),
        "{told:?}"
    );
}

fn load_late() {
    let (mut context, mut stream, mut graph) = (null_mut(), null_mut(), null_mut());
    let (mut module, mut function) = (null_mut(), null_mut());
    let code = Nvrtc::load(None).unwrap().compile(Family::Reduce, Architecture::new(9, 0)).unwrap().code;
    let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
    // These words are more than the arguments of any kernel of the family.
    let mut arguments = [0u64; 64];
    let mut parameters = [arguments.as_mut_ptr().cast()];
    let well = |got| assert_eq!(got, CUDA_SUCCESS);
    // SAFETY: the fake driver refuses the launch, so nothing runs.
    unsafe {
        well(sys::cuInit(0));
        well(sys::cuDevicePrimaryCtxRetain(&mut context, 0));
        well(sys::cuCtxSetCurrent(context));
        well(sys::cuStreamCreate(&mut stream, 1));
        well(sys::cuModuleLoadData(&mut module, code.as_ptr().cast()));
        well(sys::cuModuleGetFunction(&mut function, module, c"scaled_sum_f32".as_ptr()));
        well(sys::cuStreamBeginCapture_v2(stream, mode));
        let launched = sys::cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, stream, parameters.as_mut_ptr(), null_mut());
        assert_eq!(launched, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
        sys::cuStreamEndCapture(stream, &mut graph).result().unwrap_err();
        well(sys::cuModuleUnload(module));
        well(sys::cuStreamDestroy_v2(stream));
    }
}

/// A product reads memory that was never written.
#[test]
fn early_reads_are_told() {
    let read_early = || {
        let mut device = Nvidia::new(0, Cache::of_user()).unwrap();
        let base = device.reserve(4096).unwrap();
        let matrix = |place| Matrix::dense(base + place, DType::F32, 8);
        let product = Product::new((8, 8, 8), matrix(0), matrix(512), matrix(1024), (base + 2048, 256));
        device.write(base, &[0; 256]).unwrap();
        device.run(&[Launch::Product(product)], &|_| "a product".into()).unwrap_err();
    };
    let Some(told) = told(module_path!(), "early_reads_are_told", read_early) else { return };
    assert_eq!(told, ["cublasLtMatmul: reads A, to which nobody has written"], "by columns, A is the right operand");
}

/// A generic lambda is compiled without the option that makes functions device functions by default.
#[test]
fn generic_lambdas_are_told() {
    let Some(told) = told(module_path!(), "generic_lambdas_are_told", || assert_eq!(compile_lambda(), 6)) else {
        return;
    };
    assert_eq!(told, ["nvrtcCompileProgram: lambda.cu has a generic lambda, which is a host's by default"]);
}

/// Compiles a generic lambda without this crate's options, and returns NVRTC's result.
fn compile_lambda() -> c_int {
    let mut program: *mut c_void = null_mut();
    let source = c"__global__ void f(int* x) { [&](auto i) { x[i] = i; }(0); }";
    // SAFETY: the types are those of NVRTC's header; the texts outlive the program.
    unsafe {
        let nvrtc = libloading::Library::new("libnvrtc.so.13").unwrap();
        type Texts = *const *const c_char;
        type Create =
            unsafe extern "C" fn(*mut *mut c_void, *const c_char, *const c_char, c_int, Texts, Texts) -> c_int;
        let create = nvrtc.get::<Create>("nvrtcCreateProgram").unwrap();
        let compile =
            nvrtc.get::<unsafe extern "C" fn(*mut c_void, c_int, Texts) -> c_int>("nvrtcCompileProgram").unwrap();
        assert_eq!(create(&mut program, source.as_ptr(), c"lambda.cu".as_ptr(), 0, null(), null()), 0);
        let options = [c"--gpu-architecture=sm_90".as_ptr()];
        compile(program, 1, options.as_ptr())
    }
}
