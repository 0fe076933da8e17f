//! cuBLASLt for [`Product`]s.
//!
//! cuBLASLt's matrices are column-major. A row-major matrix that is read as column-major is its own transpose. So
//! cuBLASLt is asked for cᵀ = bᵀ·aᵀ, with b as its first operand.

use std::collections::HashMap;
use std::ffi::c_void;
use std::mem::{size_of, size_of_val};

use candle_core::DType;
use cudarc::cublaslt::{result, sys};
use gapless_kernels::cuda::launch::{ALIGNMENT, Epilogue, Matrix, Product};

use super::context::exclusive;
use super::device::DeviceError;
use super::libraries::keep_from_packages;
use super::mapped::holders;

/// A cuBLASLt handle, and the algorithms that the library proposed.
#[derive(Debug)]
pub(super) struct CublasLt {
    device: String,
    handle: sys::cublasLtHandle_t,
    chosen: HashMap<Form, Choice>,
    /// Forms for which there is no algorithm, with the library's error.
    refused: HashMap<Form, result::CublasError>,
}

/// The algorithms that the library proposed for a form, in its order.
#[derive(Debug)]
struct Choice {
    answers: Vec<sys::cublasLtMatmulAlgo_t>,
    /// Index of the algorithm that is used.
    used: usize,
}

/// Maximum number of algorithms that the library is asked to propose.
const ANSWERS: usize = 8;

/// The form of a product: all properties on which the choice of an algorithm depends. The addresses are not part of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Form {
    extents: [u64; 3],
    /// Types of a, b and c.
    types: [DType; 3],
    tf32: bool,
    transposed: [bool; 2],
    pitches: [u64; 3],
    count: u64,
    distances: [u64; 3],
    epilogue: Option<u32>,
    /// `None` if the product overwrites c. If it is added to a tensor, true if this tensor is c itself.
    onto: Option<bool>,
    workspace: u64,
    /// Alignments of a, b, c, and the tensor that the product is added to, in bytes.
    alignments: [u32; 4],
    /// Alignments of the bias and of the epilogue's auxiliary tensor, on which cuBLASLt's choice depends as well.
    beside: [Option<u32>; 2],
}

/// The result of [`CublasLt::choose`].
pub(super) enum Algorithm {
    /// An algorithm was chosen before, for a product of the same form.
    Known,
    /// An algorithm has just been chosen.
    New,
    /// The library has no algorithm for products of this form. The library is only asked once per form; `is_new` is
    /// true if this call has asked it.
    None { why: DeviceError, is_new: bool },
}

impl Form {
    fn of(product: &Product) -> Self {
        let &Product { m, n, k, a, b, c, bias, onto, batch, workspace, tf32, .. } = product;
        let d = Matrix { address: onto.unwrap_or(c.address), ..c };
        Self {
            extents: [m, n, k],
            types: [a.dtype, b.dtype, c.dtype],
            tf32,
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

/// Returns the largest power of two that divides an address, but at most the largest alignment that cuBLASLt
/// distinguishes.
fn alignment(address: u64) -> u32 {
    1 << address.trailing_zeros().min(ALIGNMENT.trailing_zeros())
}

/// cuBLASLt's descriptors for one product, which are destroyed on drop.
struct Described {
    product: sys::cublasLtMatmulDesc_t,
    /// Layouts of b, a and c.
    layouts: [sys::cublasLtMatrixLayout_t; 3],
}

impl Drop for Described {
    fn drop(&mut self) {
        // SAFETY: the descriptors were created for this struct, which is their only owner.
        unsafe {
            let _ = result::destroy_matmul_desc(self.product);
            for layout in self.layouts.into_iter().filter(|layout| !layout.is_null()) {
                let _ = result::destroy_matrix_layout(layout);
            }
        }
    }
}

impl CublasLt {
    /// Loads cuBLASLt, from the system or from a Python package. `driver_major` is the major CUDA version of the
    /// driver, whose libraries are preferred.
    ///
    /// # Errors
    /// Returns [`DeviceError::Missing`] if the library is not found, or the library's own error.
    pub(super) fn new(device: &str, driver_major: i32) -> Result<Self, DeviceError> {
        // SAFETY: loading the library has no preconditions.
        let is_there = || unsafe { sys::is_culib_present() };
        let mut names = ["libcublasLt.so.13", "libcublasLt.so.12"];
        if driver_major < 13 {
            // The driver may refuse a library of a newer CUDA version, so such a library comes last.
            names.reverse();
        }
        if !(is_there() || keep_from_packages(&names) && is_there()) {
            let remedy = "install it (Debian and Ubuntu: libcublas of the driver's CUDA version; Python: nvidia-cublas, which is \
                          found if that python3 is on PATH)";
            return Err(DeviceError::Missing { what: "cuBLASLt", remedy });
        }
        let _exclusive = exclusive();
        let handle = result::create_handle().map_err(|error| failed(device, "cublasLtCreate", &error))?;
        Ok(Self { device: device.into(), handle, chosen: HashMap::new(), refused: HashMap::new() })
    }

    /// Chooses an algorithm for a product's form, unless one was chosen before.
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
        // Reductions by atomic additions are excluded: their order, and so the result's last bits, would vary from
        // run to run.
        let schemes = sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE as u32
            | sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE as u32;
        let [of_b, of_a, of_c] = described.layouts;
        use sys::cublasLtMatmulPreferenceAttributes_t::{
            CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
            CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
            CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
        };
        // cuBLASLt's A is our b (see `describe`). Its C is the tensor that the product is added to, and its D is our
        // c.
        let [of_a_bytes, of_b_bytes, of_c_bytes, of_d_bytes] = form.alignments;
        let alignments = [
            (CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, of_b_bytes),
            (CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, of_a_bytes),
            (CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, of_d_bytes),
            (CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, of_c_bytes),
        ];
        // SAFETY: the handle, descriptors and values live until the end of this block, and the attributes have these
        // types.
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
                .and_then(|()| heuristics(self.handle, described.product, [of_b, of_a, of_c, of_c], preference));
            let _ = result::destroy_matmul_pref(preference);
            found
        };
        use sys::cublasStatus_t::{CUBLAS_STATUS_INVALID_VALUE, CUBLAS_STATUS_NOT_SUPPORTED};
        match found {
            Ok(answers) => {
                self.chosen.insert(form, Choice { answers, used: 0 });
                Ok(Algorithm::New)
            }
            // The library returns either error if it has no algorithm.
            Err(error) if [CUBLAS_STATUS_NOT_SUPPORTED, CUBLAS_STATUS_INVALID_VALUE].contains(&error.0) => {
                let why = failed(error);
                self.refused.insert(form, error);
                Ok(Algorithm::None { why, is_new: true })
            }
            Err(error) => Err(failed(error)),
        }
    }

    /// Returns the number of algorithms that the library has proposed for a product, or 0 if the product writes
    /// nothing.
    pub(super) fn answers(&self, product: &Product) -> usize {
        self.chosen.get(&Form::of(product)).map_or(0, |choice| choice.answers.len())
    }

    /// Selects one of the proposed algorithms, by index, for all products of this form.
    pub(super) fn set_answer(&mut self, product: &Product, index: usize) {
        if let Some(choice) = self.chosen.get_mut(&Form::of(product)) {
            choice.used = index.min(choice.answers.len() - 1);
        }
    }

    /// Returns a name for a product's form that is the same in every process.
    pub(super) fn form(product: &Product) -> String {
        blake3::hash(format!("{:?}", Form::of(product)).as_bytes()).to_hex()[..32].to_owned()
    }

    /// Returns the library's version; 130100 means 13.1.0.
    pub(super) fn version(&self) -> usize {
        // SAFETY: the library is loaded.
        unsafe { sys::cublasLtGetVersion() }
    }

    /// Describes the algorithm used for a product's form, or returns `None` if there is none. The description
    /// contains the algorithm's index among the proposed ones, and its tile, stages and split-k as the library's
    /// codes (`cublasLtMatmulTile_t`, `cublasLtMatmulStages_t`).
    pub(super) fn algorithm(&self, product: &Product) -> Option<String> {
        let Choice { answers, used } = self.chosen.get(&Form::of(product))?;
        use sys::cublasLtMatmulAlgoConfigAttributes_t::{
            CUBLASLT_ALGO_CONFIG_SPLITK_NUM, CUBLASLT_ALGO_CONFIG_STAGES_ID, CUBLASLT_ALGO_CONFIG_TILE_ID,
        };
        let attributes =
            [CUBLASLT_ALGO_CONFIG_TILE_ID, CUBLASLT_ALGO_CONFIG_STAGES_ID, CUBLASLT_ALGO_CONFIG_SPLITK_NUM];
        let [tile, stages, split] = attributes.map(|attribute| {
            let (mut value, mut written) = (0u32, 0);
            // SAFETY: the algorithm came from the library; each of these attributes has four bytes.
            let got = unsafe {
                let to = (&raw mut value).cast();
                sys::cublasLtMatmulAlgoConfigGetAttribute(
                    &answers[*used],
                    attribute,
                    to,
                    size_of::<u32>(),
                    &mut written,
                )
            };
            got.result().map_or_else(|_| "?".to_owned(), |()| value.to_string())
        });
        Some(format!("answer {used} of {}, tile {tile}, stages {stages}, split {split}", answers.len()))
    }

    /// Starts a product on a stream. An algorithm must have been chosen for its form.
    ///
    /// # Safety
    /// The product's addresses must point to device memory as large as the product's extents say.
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
        let Choice { answers, used } = &self.chosen[&Form::of(product)];
        // SAFETY: the caller guarantees the addresses. The library reads alpha and beta before the call returns.
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
                &answers[*used],
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
        let _exclusive = exclusive();
        // SAFETY: this struct is the handle's only owner.
        let _ = unsafe { result::destroy_handle(self.handle) };
    }
}

/// Returns the library's algorithms for a product, most promising first. Returns the library's error if there is no
/// algorithm.
///
/// # Safety
/// The handle and the descriptors must have been created by the library, and not been destroyed.
unsafe fn heuristics(
    handle: sys::cublasLtHandle_t,
    product: sys::cublasLtMatmulDesc_t,
    [a, b, c, d]: [sys::cublasLtMatrixLayout_t; 4],
    preference: sys::cublasLtMatmulPreference_t,
) -> Result<Vec<sys::cublasLtMatmulAlgo_t>, result::CublasError> {
    let mut found: Vec<sys::cublasLtMatmulHeuristicResult_t> = Vec::with_capacity(ANSWERS);
    let (asked, mut count) = (ANSWERS as i32, 0);
    let to = found.as_mut_ptr();
    // SAFETY: the caller guarantees handle and descriptors. There is room for as many results as are asked for, and
    // the library initializes the first `count`.
    let found = unsafe {
        sys::cublasLtMatmulAlgoGetHeuristic(handle, product, a, b, c, d, preference, asked, to, &mut count).result()?;
        found.set_len(count.clamp(0, asked) as usize);
        found
    };
    let usable: Vec<_> = found.iter().filter(|found| found.state.result().is_ok()).map(|found| found.algo).collect();
    match found.first() {
        Some(first) if usable.is_empty() => Err(result::CublasError(first.state)),
        None => Err(result::CublasError(sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED)),
        Some(_) => Ok(usable),
    }
}

fn failed(device: &str, call: &str, error: &result::CublasError) -> DeviceError {
    let (device, call) = (device.into(), call.into());
    match error.0 {
        sys::cublasStatus_t::CUBLAS_STATUS_ALLOC_FAILED => DeviceError::Full { device, call, holders: holders() },
        _ => DeviceError::Driver { device, call, what: error.to_string() },
    }
}

/// True if the product writes nothing. A product whose k is 0 counts too. It should write zeros, but no operation has
/// such a product.
fn is_nothing(product: &Product) -> bool {
    product.m == 0 || product.n == 0 || product.k == 0 || product.batch.count == 0
}

/// Describes a product in cuBLASLt's terms.
fn describe(product: &Product) -> Result<Described, result::CublasError> {
    let &Product { m, n, k, a, b, c, bias, batch, tf32, .. } = product;
    use sys::cublasComputeType_t::{CUBLAS_COMPUTE_32F, CUBLAS_COMPUTE_32F_FAST_TF32};
    let compute = if tf32 { CUBLAS_COMPUTE_32F_FAST_TF32 } else { CUBLAS_COMPUTE_32F };
    let described = result::create_matmul_desc(compute, sys::cudaDataType_t::CUDA_R_32F)?;
    let mut described = Described { product: described, layouts: [std::ptr::null_mut(); 3] };
    // Column-major: b as n × k, a as k × m, c as n × m, each transposed if `is_transposed`.
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
        // SAFETY: the layout was created above; the attributes have these types.
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
    // SAFETY: the descriptor was created above; the attributes have these types.
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

/// Returns the address of the auxiliary tensor that the product's epilogue writes or reads; `None` if the epilogue
/// has none.
fn beside(product: &Product) -> Option<u64> {
    match product.epilogue {
        Epilogue::None => None,
        Epilogue::Gelu { kept } => kept,
        Epilogue::GeluGrad { of } => Some(of),
    }
}

/// Returns cuBLASLt's code for the product's epilogue, or `None` if it has no epilogue. cuBLASLt's GELU is the tanh
/// approximation (PyTorch relies on this too: pull request 104061). The saved input of GELU has the type of c.
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

/// `CUBLAS_OP_N` and `CUBLAS_OP_T`. cudarc only defines these constants in its bindings of cuBLAS.
const OPERATION_NONE: i32 = 0;
const OPERATION_TRANSPOSED: i32 = 1;

fn data_type(matrix: Matrix) -> sys::cudaDataType_t {
    match matrix.dtype {
        DType::BF16 => sys::cudaDataType_t::CUDA_R_16BF,
        _ => sys::cudaDataType_t::CUDA_R_32F,
    }
}
