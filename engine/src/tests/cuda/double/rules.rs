//! That the double refuses what the documentation does.

use std::ptr::{null, null_mut};

use cudarc::cublaslt::{result, sys as lt};
use cudarc::driver::sys::{self, CUresult, CUresult::*};

use super::told;

/// A call's name and a part of what the double says, in the order of [`break_rules`].
const TOLD: [&str; 21] = [
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
    "cublasLtMatmulDescSetAttribute: attribute 7 has 4 bytes, not 8",
    "cublasLtMatmulDescDestroy: ",
    "cuMemRelease: ",
    "cuStreamDestroy: ",
    "cuMemFree: 0x30 was not allocated",
    "cuDevicePrimaryCtxRelease: it is not retained",
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
    let (mut handle, mut address, mut free, mut total) = (0, 0, 0, 0);
    let page = 2 << 20;
    let bytes = [0u8; 16];
    let location = sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: 0 };
    let access = sys::CUmemAccessDesc { location, flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
    let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
    // SAFETY: what is wrong with these calls is what the double looks for before it touches anything.
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
        expect(sys::cuMemFree_v2(0x30), CUDA_ERROR_INVALID_VALUE);
        well(sys::cuDevicePrimaryCtxRelease_v2(0));
        expect(sys::cuDevicePrimaryCtxRelease_v2(0), CUDA_ERROR_INVALID_CONTEXT);
    }
}
