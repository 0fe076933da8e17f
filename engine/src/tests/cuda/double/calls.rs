//! Tests of the calls to the driver, with and without failures.

use std::io::Write;
use std::sync::{Arc, Mutex};

use candle_core::DType;

use super::{command, folder, judge, loaded, path as path_of};
use crate::cuda::launch::{Batch, Epilogue, Matrix, scratch_in};
use crate::cuda::{Cache, Device, DeviceError, Features, HostCopy, Kernel, Launch, Nvidia, Product};
use crate::tests::cuda::products::gelu;

/// The memory that the fake driver takes for a context, a module, a loaded function, and the first product of
/// cuBLASLt.
const CONTEXT: u64 = 420 << 20;
const MODULE: u64 = 256 << 10;
const FUNCTION: u64 = 64 << 10;
const PRODUCTS: u64 = 32 << 20;

/// The page size of the fake driver's memory.
const PAGE: u64 = 2 << 20;

fn open() -> Result<Nvidia, DeviceError> {
    Nvidia::new(0, Cache::of_user())
}

/// Rows, inner extent and columns of a product. They differ from each other. The number of columns is one that
/// cuBLASLt accepts for an epilogue.
const M: u64 = 3;
const K: u64 = 5;
const N: u64 = 8;

/// Number of bytes for several matrices and the workspace.
const BYTES: u64 = 1 << 14;

/// Byte offsets of the matrices. `kept` and `twice` are not initialized.
#[derive(Clone, Copy)]
struct Places {
    x: u64,
    weight: u64,
    bias: u64,
    sum: u64,
    hidden: u64,
    kept: u64,
    twice: u64,
}

const PLACES: Places = Places { x: 0, weight: 512, bias: 1024, sum: 1536, hidden: 2048, kept: 2560, twice: 3072 };

/// Returns the launches of hidden = GELU(x·weightᵀ + bias), sum += hidden·weight, and twice = hidden + x·weightᵀ +
/// bias.
fn products(base: u64, places: Places) -> Vec<Launch> {
    let workspace = scratch_in(base + 4096, 8192);
    let matrix = |place: u64, columns| Matrix::dense(base + place, DType::F32, columns);
    let (x, weight, hidden) = (matrix(places.x, K), matrix(places.weight, K), matrix(places.hidden, N));
    let epilogue = Epilogue::Gelu { kept: Some(base + places.kept) };
    let bias = Some(base + places.bias);
    let gelu = Product { bias, epilogue, ..Product::new((M, N, K), x, weight.t(), hidden, workspace) };
    // A batch with one product per row.
    let batch = Batch { count: M, distances: [N, 0, K] };
    let sum = Product::new((1, K, N), hidden, weight, matrix(places.sum, K), workspace);
    let twice = Product::new((M, N, K), x, weight.t(), matrix(places.twice, N), workspace);
    let twice = Product { bias, onto: Some(hidden.address), ..twice };
    [gelu, Product { onto: Some(sum.c.address), batch, ..sum }, twice].map(Launch::Product).into()
}

/// Returns the initial value at an offset.
fn number(place: u64) -> f32 {
    (place / 4 % 7) as f32 - 3.0
}

fn fill(device: &mut Nvidia, base: u64) -> Result<(), DeviceError> {
    device.write(base, &(0..512).flat_map(|i| number(4 * i).to_ne_bytes()).collect::<Vec<u8>>())
}

/// Checks `sum` and `twice`.
fn expect_sum(device: &Nvidia, base: u64, places: Places) -> Result<(), DeviceError> {
    let at = |place: u64, index: u64| f64::from(number(place + 4 * index));
    let before_gelu = |row: u64, n: u64| {
        let of_k = |k| at(places.x, row * K + k) * at(places.weight, n * K + k);
        (0..K).map(of_k).sum::<f64>() + at(places.bias, n)
    };
    let hidden = |row, n| gelu(before_gelu(row, n)).0;
    let sum = |row: u64, column: u64| {
        let products = (0..N).map(|n| hidden(row, n) * at(places.weight, n * K + column));
        at(places.sum, row * K + column) + products.sum::<f64>()
    };
    let twice = |row: u64, column: u64| hidden(row, column) + before_gelu(row, column);
    type Expected<'a> = &'a dyn Fn(u64, u64) -> f64;
    let all: [(u64, u64, Expected); 2] = [(places.sum, K, &sum), (places.twice, N, &twice)];
    for (place, columns, expected) in all {
        let mut bytes = vec![0; 4 * (M * columns) as usize];
        device.read(base + place, &mut bytes)?;
        for (index, got) in (0..).zip(bytes.chunks_exact(4)) {
            let expected = expected(index / columns, index % columns);
            let got = f64::from(f32::from_ne_bytes(got.try_into().expect("four bytes")));
            // The expected value is an f32 sum of values below a hundred.
            assert!((got - expected).abs() <= 1e-4, "{got}, not {expected}");
        }
    }
    Ok(())
}

/// Returns the launches of the same products, with GELU in a separate kernel. The kernel requests more shared memory
/// than the default limit.
fn apart(base: u64) -> Vec<Launch> {
    let part = |launch| match launch {
        Launch::Product(product) => product.apart(),
        launch => vec![launch],
    };
    let with_more = |launch| match launch {
        Launch::Kernel(kernel) => Launch::Kernel(Kernel { shared_bytes: 99 << 10, ..kernel }),
        launch => launch,
    };
    products(base, PLACES).into_iter().flat_map(part).map(with_more).collect()
}

/// Uses a device in every way: records launches, replays a recording, and runs and times launches.
fn work(device: &mut Nvidia, launches: impl Fn(u64) -> Vec<Launch>) -> Result<(), DeviceError> {
    let base = device.reserve(BYTES)?;
    let describe = |index: usize| format!("launch {index}");
    let recording = device.record(launches(base), &describe)?;
    fill(device, base)?;
    device.replay(recording)?;
    device.wait()?;
    expect_sum(device, base, PLACES)?;
    fill(device, base)?;
    device.run(&launches(base), &describe)?;
    expect_sum(device, base, PLACES)?;
    fill(device, base)?;
    let all = launches(base);
    let times = device.time(&all.iter().collect::<Vec<_>>(), &describe)?;
    assert_eq!(times.len(), all.len());
    expect_sum(device, base, PLACES)
}

/// Returns the warnings that are logged during `work`.
fn warnings(work: impl FnOnce()) -> String {
    let lines = Arc::new(Mutex::new(Vec::new()));
    let writer = {
        let lines = lines.clone();
        move || Lines(lines.clone())
    };
    let format = tracing_subscriber::fmt().with_max_level(tracing::Level::WARN).with_ansi(false);
    tracing::subscriber::with_default(format.with_writer(writer).finish(), work);
    String::from_utf8(lines.lock().unwrap().clone()).unwrap()
}

struct Lines(Arc<Mutex<Vec<u8>>>);

impl Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Memory is allocated, written, read and released. This is repeated with several devices in one process.
#[test]
fn memory_comes_and_goes() {
    judge(module_path!(), "memory_comes_and_goes", |double| {
        for _ in 0..2 {
            let (mut device, mut other) = (open().unwrap(), open().unwrap());
            let address = device.reserve(1000).unwrap();
            let elsewhere = other.reserve(PAGE + 1).unwrap();
            let bytes: Vec<u8> = (0..1000).map(|i| i as u8).collect();
            device.write(address, &bytes).unwrap();
            other.write(elsewhere, &[1; 1000]).unwrap();
            let mut back = vec![0; 1000];
            device.read(address, &mut back).unwrap();
            assert_eq!(bytes, back);
            assert!(device.read(elsewhere, &mut back).is_err(), "the memory of another");
            drop(other);
            let memory = device.memory().unwrap();
            assert_eq!((memory.arena, memory.rounding(), memory.unexplained()), (PAGE, 0, 0), "{memory}");
            drop(device);
            assert_eq!(double.left(), "");
        }
    });
}

/// Memory is extended at its end, up to the size of the device's memory. The address and the contents stay the same.
#[test]
fn memory_goes_on() {
    judge(module_path!(), "memory_goes_on", |double| {
        double.set("MEMORY", CONTEXT + 4 * PAGE);
        let mut device = open().unwrap();
        let address = device.reserve(1000).unwrap();
        device.write(address, &[7; 1000]).unwrap();
        device.extend(PAGE).unwrap();
        assert_eq!(device.memory().unwrap().arena, PAGE, "there was as much");
        assert!(device.write(address + PAGE, &[8]).is_err(), "beyond the end");
        for (bytes, pages) in [(PAGE + 1, 2), (4 * PAGE, 4), (3 * PAGE, 4)] {
            device.extend(bytes).unwrap();
            let memory = device.memory().unwrap();
            assert_eq!((memory.arena, memory.unexplained()), (pages * PAGE, 0), "{memory}");
            device.write(address + pages * PAGE - 1, &[8]).unwrap();
        }
        let error = device.extend(4 * PAGE + 1).unwrap_err();
        assert!(matches!(error, DeviceError::OutOfMemory { needed: PAGE, free: 0, .. }), "{error}");
        let mut back = vec![0; 1000];
        device.read(address, &mut back).unwrap();
        assert_eq!(back, [7; 1000]);
        for call in ["cuMemCreate", "cuMemMap", "cuMemSetAccess"] {
            let mut device = open().unwrap();
            double.set("MEMORY", CONTEXT + 8 * PAGE);
            device.reserve(1000).unwrap();
            double.fail(call, 1, 999);
            let error = device.extend(2 * PAGE).unwrap_err().to_string();
            assert!(error.contains(&format!("{call} failed on GPU 0")), "{error}");
        }
    });
}

/// The first device of a process retains the context, which is never released.
#[test]
fn devices_share_a_context() {
    judge(module_path!(), "devices_share_a_context", |double| {
        for _ in 0..3 {
            work(&mut open().unwrap(), apart).unwrap();
        }
        let calls = double.calls();
        let count = |call: &str| calls.iter().find(|(name, _)| name == call).map_or(0, |(_, count)| *count);
        assert_eq!((count("cuDevicePrimaryCtxRetain"), count("cuDevicePrimaryCtxRelease")), (1, 0), "{calls:?}");
    });
}

/// Cards of the same model have the same name, whatever their ordinals and bus ids are. The loaded libraries are the
/// fake ones.
#[test]
fn a_device_says_what_it_is() {
    judge(module_path!(), "a_device_says_what_it_is", |_| {
        let device = open().unwrap();
        assert_eq!(device.card(), "Double of sm_90");
        assert_eq!(device.name(), "GPU 0 (Double of sm_90, 00000000:1B:00.0)");
        assert_eq!((device.architecture().to_string(), device.driver()), ("sm_90".to_owned(), "13.0".to_owned()));
        let folder = std::env::var("LD_LIBRARY_PATH").unwrap();
        let mut libraries = device.libraries();
        libraries.sort();
        let expected = ["libcublasLt.so.13", "libcuda.so.1", "libnvrtc.so.13"].map(|name| format!("{folder}/{name}"));
        assert_eq!(libraries, expected);
    });
}

/// cuBLASLt and NVRTC are found in the packages of a Python whose folder is on `PATH`.
#[test]
fn libraries_of_packages_are_found() {
    const LIBRARIES: [&str; 2] = ["libcublasLt.so.13", "libnvrtc.so.13"];
    // SAFETY: the libraries are not used.
    let is_installed = || LIBRARIES.iter().any(|name| unsafe { libloading::Library::new(*name) }.is_ok());
    if loaded().is_some() {
        if is_installed() {
            return gapless_testing::not_checked("the loader finds others");
        }
        let device = open().unwrap();
        let packaged = device.libraries().into_iter().filter(|path| path.contains("/site-packages/nvidia/cu13/lib/"));
        assert_eq!(packaged.count(), 2, "{:?}", device.libraries());
        return;
    }
    let Some(folder) = folder() else { return };
    let elsewhere = tempfile::tempdir().unwrap();
    let copy = |name: &str, to: &str| {
        let to = elsewhere.path().join(to);
        std::fs::create_dir_all(&to).unwrap();
        std::fs::copy(folder.join(name), to.join(name)).unwrap();
    };
    copy("libcuda.so.1", "driver");
    LIBRARIES.iter().for_each(|name| copy(name, "lib/python3.12/site-packages/nvidia/cu13/lib"));
    std::fs::create_dir(elsewhere.path().join("bin")).unwrap();
    std::fs::write(elsewhere.path().join("bin/python3"), "").unwrap();
    let path = std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default()).collect::<Vec<_>>();
    let path = std::env::join_paths([elsewhere.path().join("bin")].into_iter().chain(path)).unwrap();
    let name = path_of(module_path!(), "libraries_of_packages_are_found");
    let output = command(&["--exact", &name, "--nocapture"])
        .env("LD_LIBRARY_PATH", elsewhere.path().join("driver"))
        .env("PATH", path)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.contains("1 passed"), "{said}");
}

/// The memory that a recording takes is accounted for. If the library does not have an epilogue, the epilogue becomes
/// a separate kernel, with a warning.
#[test]
fn products_with_and_without_epilogues() {
    judge(module_path!(), "products_with_and_without_epilogues", |double| {
        for has_none in [0, 1] {
            double.set("HAS_NO_EPILOGUES", has_none);
            let mut device = open().unwrap();
            let warned = warnings(|| work(&mut device, |base| products(base, PLACES)).unwrap());
            let expected = "no algorithm with an epilogue; two launches product=\"launch 0\"";
            assert_eq!(warned.matches(expected).count(), has_none as usize, "once for a form: {warned}");
            let memory = device.memory().unwrap();
            // The graph and its kernels are on the device when the recording ends, so no memory comes into use after
            // it.
            assert_eq!((memory.rounding(), memory.unexplained()), (0, 0), "{memory}");
            assert!(memory.in_use >= CONTEXT + PRODUCTS + PAGE, "{memory}");
        }
    });
}

/// Memory that comes into use with the first launch counts as rounding up to one page per entry, and as unexplained
/// above that.
#[test]
fn memory_that_comes_late() {
    judge(module_path!(), "memory_that_comes_late", |double| {
        for (pages, rounding, unexplained) in [(1, 1, 0), (4, 3, 0), (40, 4, 32)] {
            double.set("LOCAL_MEMORY", pages * PAGE);
            let mut device = open().unwrap();
            work(&mut device, |base| products(base, PLACES)).unwrap();
            let memory = device.memory().unwrap();
            let expected = [rounding, unexplained].map(|pages| (pages * PAGE) as i64);
            assert_eq!([memory.rounding(), memory.unexplained()], expected, "{memory}");
        }
    });
}

/// Two older drivers. If a driver has no function for the time between events, the host's clock is used. If it lacks
/// `cuFuncLoad`, a function is loaded by a query of one of its attributes.
#[test]
fn older_drivers() {
    judge(module_path!(), "older_drivers", |double| {
        for (version, has_load, has_events) in [(12_030, false, false), (12_040, true, false), (12_080, true, true)] {
            double.set("VERSION", version);
            work(&mut open().unwrap(), apart).unwrap();
            let calls = double.calls();
            let has = |part: &str| calls.iter().any(|(name, _)| name.contains(part));
            assert_eq!((has("cuFuncLoad"), has("Event")), (has_load, has_events), "{version}");
        }
    });
}

/// A device can move between threads while another thread uses another device.
#[test]
fn devices_go_from_thread_to_thread() {
    judge(module_path!(), "devices_go_from_thread_to_thread", |_| {
        let one = || {
            // There are enough repetitions that one thread captures while the other makes calls that its own capture
            // would forbid.
            for launches in [apart, |base| products(base, PLACES)].repeat(25) {
                let mut device = open().unwrap();
                let device = std::thread::spawn(move || {
                    work(&mut device, launches).unwrap();
                    device
                });
                let device = device.join().unwrap();
                std::thread::spawn(|| drop(device)).join().unwrap();
            }
        };
        std::thread::scope(|scope| {
            scope.spawn(one);
            scope.spawn(one);
        });
    });
}

/// cuBLASLt is told the alignment of matrices. It determines the alignment of the bias and of the auxiliary tensor
/// from their addresses.
#[test]
fn an_algorithm_is_for_how_its_operands_are_aligned() {
    judge(module_path!(), "an_algorithm_is_for_how_its_operands_are_aligned", |_| {
        let mut device = open().unwrap();
        let base = device.reserve(BYTES).unwrap();
        for shift in [0, 64, 4] {
            for places in [
                Places { x: PLACES.x + shift, ..PLACES },
                Places { weight: PLACES.weight + shift, ..PLACES },
                Places { bias: PLACES.bias + shift, ..PLACES },
                Places { sum: PLACES.sum + shift, ..PLACES },
                Places { hidden: PLACES.hidden + shift, ..PLACES },
                Places { kept: PLACES.kept + shift, ..PLACES },
            ] {
                fill(&mut device, base).unwrap();
                device.run(&products(base, places), &|index| format!("launch {index}")).unwrap();
                expect_sum(&device, base, places).unwrap();
            }
        }
    });
}

/// Memory runs out at every possible point. Each time, the error says so, and everything that was allocated is
/// released.
#[test]
fn memory_may_not_be_enough() {
    judge(module_path!(), "memory_may_not_be_enough", |double| {
        for (bytes, expected) in [
            (CONTEXT - 1, "GPU 0 (Double of sm_90, 00000000:1B:00.0) has no memory left (cuDevicePrimaryCtxRetain"),
            (
                CONTEXT + PAGE - 1,
                "has 2.00 MiB (2097151 bytes) of its 422.00 MiB free, but 2 MiB (2097152 bytes) are needed",
            ),
            (CONTEXT + PAGE, "has no memory left (loading elementwise_gelu_f32_"),
            (CONTEXT + PAGE + MODULE, "has no memory left (loading elementwise_gelu_f32_"),
            (CONTEXT + PAGE + MODULE + FUNCTION, "has no memory left (loading elementwise_add_f32_"),
            (CONTEXT + PAGE + 2 * (MODULE + FUNCTION), "has no memory left (starting Product"),
            (CONTEXT + PAGE + 2 * (MODULE + FUNCTION) + PRODUCTS, "has no memory left (cuGraphUpload"),
        ] {
            double.set("MEMORY", bytes);
            let error = open().and_then(|mut device| work(&mut device, apart)).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
            assert_eq!(double.left(), "");
        }
    });
}

/// Each call of the driver fails once. The failure is reported as an error, and everything created before is
/// released.
#[test]
fn every_call_may_fail() {
    judge(module_path!(), "every_call_may_fail", |double| {
        let folder = tempfile::tempdir().unwrap();
        let all = |name: &str| {
            let cache = folder.path().join(name).join("kernels");
            // Compiled kernels may stay in the cache, but the choices of algorithms are removed, so that each run
            // measures them.
            let entries = std::fs::read_dir(&cache).into_iter().flatten().flatten().map(|entry| entry.path());
            entries
                .filter(|path| path.extension().is_some_and(|end| end == "products"))
                .for_each(|path| std::fs::remove_file(path).unwrap());
            let mut device = Nvidia::new(0, Cache::new(cache))?;
            work(&mut device, apart)?;
            device.memory().map(drop)
        };
        all("").unwrap();
        let calls = double.calls();
        // Calls that release something are excluded, because a resource whose release fails stays allocated.
        let gives_back =
            |name: &str| ["Destroy", "Release", "Free", "Unmap", "Unload"].iter().any(|word| name.contains(word));
        // Calls that are only made once per process are excluded.
        let elsewhere =
            ["nvrtcVersion", "nvrtcGetNumSupportedArchs", "nvrtcGetSupportedArchs", "cuDevicePrimaryCtxRetain"];
        let calls = calls.into_iter().filter(|(name, _)| !gives_back(name) && !elsewhere.contains(&name.as_str()));
        // These calls are excluded, because code is usable even if the resources of its kernels are unknown.
        let calls: Vec<_> = calls.filter(|(name, _)| !name.starts_with("nvrtcGetProgramLog")).collect();
        assert!(calls.len() > 35, "{calls:?}");
        for (name, count) in calls {
            // The first call and one in the middle fail. The last one is excluded, because it may belong to the
            // release.
            for number in std::collections::BTreeSet::from([1, (count / 2).max(1)]) {
                let is_compiler = name.starts_with("nvrtc");
                double.fail(&name, number, if is_compiler { 1 } else { 999 });
                let failed = all(if is_compiler { &name } else { "" });
                let error = failed.expect_err(&format!("call {number} of {name} fails"));
                let text = error.to_string();
                // The error must contain the name or purpose of the call, and its result.
                let said = match name.as_str() {
                    name if is_compiler => format!("{name} failed: NVRTC_ERROR_OUT_OF_MEMORY"),
                    "cuModuleLoadData" => "loading elementwise_gelu_f32_".into(),
                    "cuModuleGetFunction" => "finding elementwise_gelu_f32_".into(),
                    "cuFuncLoad" => "loading elementwise_gelu_f32_".into(),
                    "cuFuncSetAttribute" => "allowing elementwise_gelu_f32_".into(),
                    "cuLaunchKernel" => "launching elementwise_gelu_f32_".into(),
                    "cuInit" | "cuDeviceGet" => "GPU 0 cannot be used here".into(),
                    "cublasLtMatmul" => "starting Product".into(),
                    "cublasLtCreate" => "has no memory left (cublasLtCreate".into(),
                    name if name.starts_with("cublasLt") => "has no memory left".into(),
                    name => format!("{name} failed on GPU 0"),
                };
                assert!(text.contains(&said), "call {number} of {name}: {text}");
                assert_eq!(double.left(), "", "after call {number} of {name}: {text}");
            }
        }
    });
}

/// A product in TF32 is one of another form than the same product in f32, and rounds its operands.
#[test]
fn products_in_tf32() {
    judge(module_path!(), "products_in_tf32", |_| {
        let mut device = open().unwrap();
        assert!(!device.features().tf32, "off by default");
        device.use_tf32();
        let base = device.reserve(BYTES).unwrap();
        // TF32 has 10 bits of mantissa.
        let x = 1.0 + f32::powi(2.0, -12);
        device.write(base, &[x; 512].map(f32::to_ne_bytes).concat()).unwrap();
        let matrix = |place: u64, columns| Matrix::dense(base + place, DType::F32, columns);
        let (x_at, weight, hidden) = (matrix(PLACES.x, K), matrix(PLACES.weight, K).t(), matrix(PLACES.hidden, N));
        for features in [Features::default(), device.features(), Features::default()] {
            let mut product = Product::new((M, N, K), x_at, weight, hidden, scratch_in(base + 4096, 8192));
            product.with_features(features);
            device.run(&[Launch::Product(product)], &|_| "a product".into()).unwrap();
            let mut bytes = [0; 4];
            device.read(base + PLACES.hidden, &mut bytes).unwrap();
            let expected = if features.tf32 { K as f32 } else { K as f32 * x * x };
            // The sum of five products has at most five roundings of 2⁻²⁴ of it.
            let got = f32::from_ne_bytes(bytes);
            assert!((got - expected).abs() <= 2e-6, "{got}, not {expected}, with {features:?}");
        }
        let bf16 = |of: Matrix| Matrix { dtype: DType::BF16, ..of };
        let mut product =
            Product::new((M, N, K), bf16(x_at), bf16(weight), bf16(hidden), scratch_in(base + 4096, 8192));
        product.with_features(device.features());
        assert!(!product.tf32, "only products of f32 matrices");
    });
}

/// A recording waits for copies whose ends it does not contain. A copy that was started on its own may be waited for
/// later. A device that is dropped while a copy is under way waits for it before it releases the copy's memory.
#[test]
fn copies_without_their_ends() {
    judge(module_path!(), "copies_without_their_ends", |double| {
        let folder = tempfile::tempdir().unwrap();
        for has_file in [false, true] {
            let mut device = open().unwrap();
            if has_file {
                device.offload_to(folder.path());
            }
            let base = device.reserve(BYTES).unwrap();
            device.reserve_host(256, 64).unwrap();
            let copy = |index: u32, place: u64, to_host: bool| {
                Launch::Copy(HostCopy { index, address: base + place, offset: 128, bytes: 64, to_host })
            };
            let (out, back) = (|| copy(0, 0, true), || copy(1, 512, false));
            let describe = |index: usize| format!("launch {index}");
            let expect = |device: &Nvidia, value: u8| {
                let mut bytes = [0; 64];
                device.read(base + 512, &mut bytes).unwrap();
                assert_eq!(bytes, [value; 64], "with a file: {has_file}");
            };
            let recordings = [out(), back()].map(|launch| device.record(vec![launch], &describe).unwrap());
            device.write(base, &[7; 64]).unwrap();
            recordings.into_iter().for_each(|recording| device.replay(recording).unwrap());
            device.wait().unwrap();
            expect(&device, 7);
            device.write(base, &[8; 64]).unwrap();
            for launch in [out(), back(), Launch::CopyEnd(1)] {
                device.run(&[launch], &describe).unwrap();
            }
            expect(&device, 8);
            device.run(&[out()], &describe).unwrap();
            drop(device);
            assert_eq!(double.left(), "");
        }
    });
}

/// Code is compiled for the architecture of the device. If the compiler does not support the architecture, the error
/// says so.
#[test]
fn devices_of_other_architectures() {
    judge(module_path!(), "devices_of_other_architectures", |double| {
        for architecture in [80, 120] {
            double.set("ARCHITECTURE", architecture);
            work(&mut open().unwrap(), apart).unwrap();
        }
        double.set("ARCHITECTURE", 75);
        let error = open().unwrap_err();
        assert!(
            error.is_absence() && error.to_string().contains("it is sm_75, and kernels need sm_80 or later"),
            "{error}"
        );
        double.set("ARCHITECTURE", 130);
        let error = work(&mut open().unwrap(), apart).unwrap_err();
        assert!(error.is_absence() && error.to_string().contains("cannot compile for sm_130"), "{error}");
    });
}

/// A device is requested whose ordinal does not exist.
#[test]
fn a_device_that_is_not_there() {
    judge(module_path!(), "a_device_that_is_not_there", |double| {
        for devices in [0, 1] {
            double.set("DEVICES", devices);
            assert_eq!(Nvidia::count(), devices as usize);
            let error = Nvidia::new(devices as usize, Cache::of_user()).unwrap_err();
            assert!(error.is_absence() && error.to_string().contains("cannot be used here"), "{error}");
        }
    });
}
