//! cuBLASLt for [`Product`]s. As the rest of the driver's side, it has not met a GPU yet.
//!
//! cuBLASLt goes by columns. A matrix whose rows are dense is, by columns, its transpose: so cᵀ = bᵀ·aᵀ is what it is asked for,
//! with b in the first place.

use std::collections::HashMap;
use std::ffi::c_void;
use std::mem::{size_of, size_of_val};

use candle_core::DType;
use cudarc::cublaslt::{result, sys};
use gapless_kernels::cuda::launch::{ALIGNMENT, Epilogue, Matrix, Product};

use super::device::DeviceError;
use super::libraries::keep_from_packages;
use super::mapped::holders;

/// A handle of the library, and the algorithms that it chose.
#[derive(Debug)]
pub(super) struct CublasLt {
    device: String,
    handle: sys::cublasLtHandle_t,
    chosen: HashMap<Form, sys::cublasLtMatmulAlgo_t>,
    /// Forms that there is no algorithm for, and what the library says of them.
    refused: HashMap<Form, result::CublasError>,
}

/// What an algorithm depends on: a product without its addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Form {
    extents: [u64; 3],
    /// Of a, b and c.
    types: [DType; 3],
    transposed: [bool; 2],
    pitches: [u64; 3],
    count: u64,
    distances: [u64; 3],
    epilogue: Option<u32>,
    /// Whether it is added to something, and whether that is c.
    onto: Option<bool>,
    workspace: u64,
    /// Of a, b, c, and what c is added to.
    alignments: [u32; 4],
    /// Of the bias, and of what the epilogue keeps or reads: cuBLASLt sees them when it chooses, and goes by them.
    beside: [Option<u32>; 2],
}

/// What there is for a product.
pub(super) enum Algorithm {
    /// One that was chosen before, for a product of its form.
    Known,
    /// One that has just been chosen.
    New,
    /// None, as the library says, which is asked once for each form.
    None { why: DeviceError, is_new: bool },
}

impl Form {
    fn of(product: &Product) -> Self {
        let &Product { m, n, k, a, b, c, bias, onto, batch, workspace, .. } = product;
        let d = Matrix { address: onto.unwrap_or(c.address), ..c };
        Self {
            extents: [m, n, k],
            types: [a.dtype, b.dtype, c.dtype],
            transposed: [a.is_transposed, b.is_transposed],
            pitches: [a.pitch, b.pitch, c.pitch],
            count: batch.count,
            distances: batch.distances,
            epilogue: epilogue(product),
            onto: onto.map(|onto| onto == c.address),
            workspace: workspace.1,
            alignments: [(a, 0), (b, 1), (c, 2), (d, 2)].map(|(matrix, index)| {
                let distance = if batch.count > 1 { batch.distances[index] } else { 0 };
                alignment(matrix.address | (distance * matrix.dtype.size_in_bytes() as u64))
            }),
            beside: [bias, beside(product)].map(|address| address.map(alignment)),
        }
    }
}

/// The power of two that divides an address, as far as cuBLASLt asks.
fn alignment(address: u64) -> u32 {
    1 << address.trailing_zeros().min(ALIGNMENT.trailing_zeros())
}

/// Descriptions of one product, which cuBLASLt keeps until they are dropped.
struct Described {
    product: sys::cublasLtMatmulDesc_t,
    /// Of b, a and c.
    layouts: [sys::cublasLtMatrixLayout_t; 3],
}

impl Drop for Described {
    fn drop(&mut self) {
        // SAFETY: they were made together, and nobody else has them.
        unsafe {
            let _ = result::destroy_matmul_desc(self.product);
            for layout in self.layouts.into_iter().filter(|layout| !layout.is_null()) {
                let _ = result::destroy_matrix_layout(layout);
            }
        }
    }
}

impl CublasLt {
    /// The library, where it is installed or a package of Python's brought it, for a driver of this major version of CUDA.
    ///
    /// # Errors
    /// [`DeviceError::Missing`], or what it says itself.
    pub(super) fn new(device: &str, driver_major: i32) -> Result<Self, DeviceError> {
        // SAFETY: the library is one that may be loaded at any time.
        let is_there = || unsafe { sys::is_culib_present() };
        let mut names = ["libcublasLt.so.13", "libcublasLt.so.12"];
        if driver_major < 13 {
            // A library of a newer CUDA may refuse the driver.
            names.reverse();
        }
        if !(is_there() || keep_from_packages(&names) && is_there()) {
            let remedy = "install it (Debian and Ubuntu: libcublas of the driver's CUDA version; Python: nvidia-cublas, which is \
                          found if that python3 is on PATH)";
            return Err(DeviceError::Missing { what: "cuBLASLt", remedy });
        }
        let handle = result::create_handle().map_err(|error| failed(device, "cublasLtCreate", &error))?;
        Ok(Self { device: device.into(), handle, chosen: HashMap::new(), refused: HashMap::new() })
    }

    /// Chooses an algorithm for a product.
    pub(super) fn choose(&mut self, product: &Product) -> Result<Algorithm, DeviceError> {
        let form = Form::of(product);
        if is_nothing(product) || self.chosen.contains_key(&form) {
            return Ok(Algorithm::Known);
        }
        let failed = |error: result::CublasError| {
            failed(&self.device, &format!("choosing an algorithm for {product:?}"), &error)
        };
        if let Some(error) = self.refused.get(&form) {
            return Ok(Algorithm::None { why: failed(*error), is_new: false });
        }
        let described = describe(product).map_err(failed)?;
        let preference = result::create_matmul_pref().map_err(failed)?;
        let bytes = product.workspace.1 as usize;
        // Sums by atomic additions would depend on chance.
        let schemes = sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u32
            | sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE as u32;
        let [of_b, of_a, of_c] = described.layouts;
        use sys::cublasLtMatmulPreferenceAttributes_t::{
            CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
            CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
            CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
        };
        // Its A is our b, see `describe`; its C is what is added to, and its D our c.
        let [of_a_bytes, of_b_bytes, of_c_bytes, of_d_bytes] = form.alignments;
        let alignments = [
            (CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, of_b_bytes),
            (CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, of_a_bytes),
            (CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, of_d_bytes),
            (CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, of_c_bytes),
        ];
        // SAFETY: all of it was made above and is there until the end; the attributes have these types.
        let found = unsafe {
            let set = |attribute, value: *const c_void, bytes| {
                result::set_matmul_pref_attribute(preference, attribute, value, bytes)
            };
            let found = set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, (&raw const bytes).cast(), size_of::<usize>())
                .and_then(|()| {
                    set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, (&raw const schemes).cast(), size_of::<u32>())
                })
                .and_then(|()| {
                    alignments
                        .iter()
                        .try_for_each(|&(attribute, bytes)| set(attribute, (&raw const bytes).cast(), size_of::<u32>()))
                })
                .and_then(|()| {
                    let all = (self.handle, described.product);
                    result::get_matmul_algo_heuristic(all.0, all.1, of_b, of_a, of_c, of_c, preference)
                });
            let _ = result::destroy_matmul_pref(preference);
            found
        };
        use sys::cublasStatus_t::{CUBLAS_STATUS_INVALID_VALUE, CUBLAS_STATUS_NOT_SUPPORTED};
        match found {
            Ok(found) => {
                self.chosen.insert(form, found.algo);
                Ok(Algorithm::New)
            }
            // Both are said of what there is nothing for.
            Err(error) if [CUBLAS_STATUS_NOT_SUPPORTED, CUBLAS_STATUS_INVALID_VALUE].contains(&error.0) => {
                let why = failed(error);
                self.refused.insert(form, error);
                Ok(Algorithm::None { why, is_new: true })
            }
            Err(error) => Err(failed(error)),
        }
    }

    /// Starts a product on a stream, for whose form an algorithm was chosen.
    ///
    /// # Safety
    /// The addresses are those of memory that is as large as the product says.
    pub(super) unsafe fn start(
        &self,
        product: &Product,
        stream: cudarc::driver::sys::CUstream,
    ) -> Result<(), DeviceError> {
        if is_nothing(product) {
            return Ok(());
        }
        let failed = |error: result::CublasError| failed(&self.device, &format!("starting {product:?}"), &error);
        let described = describe(product).map_err(failed)?;
        let [of_b, of_a, of_c] = described.layouts;
        let (alpha, beta) = (1f32, if product.onto.is_some() { 1f32 } else { 0f32 });
        let at = |address: u64| address as usize as *mut c_void;
        let (workspace, bytes) = product.workspace;
        let algorithm = &self.chosen[&Form::of(product)];
        // SAFETY: by this function's contract; alpha and beta are read before the call returns.
        unsafe {
            result::matmul(
                self.handle,
                described.product,
                (&raw const alpha).cast(),
                (&raw const beta).cast(),
                at(product.b.address),
                of_b,
                at(product.a.address),
                of_a,
                at(product.onto.unwrap_or(product.c.address)),
                of_c,
                at(product.c.address),
                of_c,
                algorithm,
                at(workspace),
                bytes as usize,
                stream.cast(),
            )
        }
        .map_err(failed)
    }
}

impl Drop for CublasLt {
    fn drop(&mut self) {
        // SAFETY: nobody else has it.
        let _ = unsafe { result::destroy_handle(self.handle) };
    }
}

fn failed(device: &str, call: &str, error: &result::CublasError) -> DeviceError {
    let (device, call) = (device.into(), call.into());
    match error.0 {
        sys::cublasStatus_t::CUBLAS_STATUS_ALLOC_FAILED => DeviceError::Full { device, call, holders: holders() },
        _ => DeviceError::Driver { device, call, what: error.to_string() },
    }
}

/// Whether no number is written. (A sum over nothing is not nothing, but no operation has one.)
fn is_nothing(product: &Product) -> bool {
    product.m == 0 || product.n == 0 || product.k == 0 || product.batch.count == 0
}

/// A product in cuBLASLt's terms.
fn describe(product: &Product) -> Result<Described, result::CublasError> {
    let &Product { m, n, k, a, b, c, bias, batch, .. } = product;
    let types = (sys::cublasComputeType_t::CUBLAS_COMPUTE_32F, sys::cudaDataType_t::CUDA_R_32F);
    let described = result::create_matmul_desc(types.0, types.1)?;
    let mut described = Described { product: described, layouts: [std::ptr::null_mut(); 3] };
    // By columns: b as n × k, a as k × m, c as n × m, unless their columns were dense already.
    let by_columns = [(b, (n, k)), (a, (k, m)), (c, (n, m))];
    for (index, (matrix, extents)) in by_columns.into_iter().enumerate() {
        let (rows, columns) = if matrix.is_transposed { (extents.1, extents.0) } else { extents };
        let layout = result::create_matrix_layout(data_type(matrix), rows, columns, matrix.pitch as i64)?;
        described.layouts[index] = layout;
        let distance = batch.distances[[1, 0, 2][index]] as i64;
        let count = batch.count as i32;
        use sys::cublasLtMatrixLayoutAttribute_t::{
            CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET,
        };
        // SAFETY: the layout was made above; the attributes have these types.
        unsafe {
            let set = |attribute, value: *const c_void, bytes| {
                result::set_matrix_layout_attribute(layout, attribute, value, bytes)
            };
            set(CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, (&raw const count).cast(), size_of_val(&count))?;
            set(CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, (&raw const distance).cast(), size_of_val(&distance))?;
        }
    }
    use sys::cublasLtMatmulDescAttributes_t::{
        CUBLASLT_MATMUL_DESC_BIAS_POINTER, CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD,
        CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, CUBLASLT_MATMUL_DESC_TRANSA, CUBLASLT_MATMUL_DESC_TRANSB,
    };
    let operation = |matrix: Matrix| match matrix.is_transposed {
        true => OPERATION_TRANSPOSED,
        false => OPERATION_NONE,
    };
    // SAFETY: the description was made above; the attributes have these types.
    unsafe {
        let set = |attribute, value: *const c_void, bytes| {
            result::set_matmul_desc_attribute(described.product, attribute, value, bytes)
        };
        let (of_b, of_a) = (operation(b), operation(a));
        set(CUBLASLT_MATMUL_DESC_TRANSA, (&raw const of_b).cast(), size_of_val(&of_b))?;
        set(CUBLASLT_MATMUL_DESC_TRANSB, (&raw const of_a).cast(), size_of_val(&of_a))?;
        if let Some(epilogue) = epilogue(product) {
            set(CUBLASLT_MATMUL_DESC_EPILOGUE, (&raw const epilogue).cast(), size_of_val(&epilogue))?;
        }
        if let Some(address) = bias {
            set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, (&raw const address).cast(), size_of_val(&address))?;
        }
        if let Some(address) = beside(product) {
            let pitch = c.pitch as i64;
            set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, (&raw const address).cast(), size_of_val(&address))?;
            set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, (&raw const pitch).cast(), size_of_val(&pitch))?;
        }
    }
    Ok(described)
}

/// What an epilogue keeps, or reads: its address.
fn beside(product: &Product) -> Option<u64> {
    match product.epilogue {
        Epilogue::None => None,
        Epilogue::Gelu { kept } => kept,
        Epilogue::GeluGrad { of } => Some(of),
    }
}

/// What follows the product, where anything does. cuBLASLt's GELU is the tanh form (as PyTorch relies on: pull request 104061),
/// and what it keeps has the type of c.
fn epilogue(product: &Product) -> Option<u32> {
    use sys::cublasLtEpilogue_t::{
        CUBLASLT_EPILOGUE_BIAS, CUBLASLT_EPILOGUE_DGELU, CUBLASLT_EPILOGUE_GELU, CUBLASLT_EPILOGUE_GELU_AUX,
        CUBLASLT_EPILOGUE_GELU_AUX_BIAS, CUBLASLT_EPILOGUE_GELU_BIAS,
    };
    let epilogue = match (product.epilogue, product.bias) {
        (Epilogue::None, None) => return None,
        (Epilogue::None, Some(_)) => CUBLASLT_EPILOGUE_BIAS,
        (Epilogue::Gelu { kept: None }, None) => CUBLASLT_EPILOGUE_GELU,
        (Epilogue::Gelu { kept: None }, Some(_)) => CUBLASLT_EPILOGUE_GELU_BIAS,
        (Epilogue::Gelu { kept: Some(_) }, None) => CUBLASLT_EPILOGUE_GELU_AUX,
        (Epilogue::Gelu { kept: Some(_) }, Some(_)) => CUBLASLT_EPILOGUE_GELU_AUX_BIAS,
        (Epilogue::GeluGrad { .. }, _) => CUBLASLT_EPILOGUE_DGELU,
    };
    Some(epilogue as u32)
}

/// `CUBLAS_OP_N` and `CUBLAS_OP_T`, which cudarc has in another library's header.
const OPERATION_NONE: i32 = 0;
const OPERATION_TRANSPOSED: i32 = 1;

fn data_type(matrix: Matrix) -> sys::cudaDataType_t {
    match matrix.dtype {
        DType::BF16 => sys::cudaDataType_t::CUDA_R_16BF,
        _ => sys::cudaDataType_t::CUDA_R_32F,
    }
}
