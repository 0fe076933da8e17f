//! Tests of the choice of algorithms for products.

use candle_core::DType;

use super::judge;
use crate::cuda::launch::{Matrix, scratch_in};
use crate::cuda::{Cache, Device, Launch, Nvidia, Product};

/// Two products of the same form.
fn launches(base: u64) -> Vec<Launch> {
    let matrix = |place: u64| Matrix::dense(base + place, DType::F32, 8);
    let product = |to| Product::new((8, 8, 8), matrix(0), matrix(256), matrix(to), scratch_in(base + 4096, 8192));
    [512, 1024].map(|to| Launch::Product(product(to))).into()
}

/// If a form is new, all of its algorithms are timed, with four starts each. Nothing is timed if an earlier process
/// has cached the choice, or if the driver cannot time events.
#[test]
fn algorithms_are_timed_once() {
    judge(module_path!(), "algorithms_are_timed_once", |double| {
        let folder = tempfile::tempdir().unwrap();
        let started = |folder: &std::path::Path| {
            let count = |double: &super::Double| {
                double.calls().iter().find(|(name, _)| name == "cublasLtMatmul").map_or(0, |(_, count)| *count)
            };
            let before = count(double);
            let mut device = Nvidia::new(0, Cache::new(folder)).unwrap();
            let base = device.reserve(1 << 14).unwrap();
            device.record(launches(base), &|index| format!("launch {index}")).unwrap();
            count(double) - before
        };
        // This counts one start of the chosen algorithm, and two recorded products.
        assert_eq!(started(folder.path()), 3 * 4 + 3);
        assert_eq!(started(folder.path()), 3);
        let kept = std::fs::read_dir(folder.path()).unwrap().filter_map(|entry| entry.ok());
        assert_eq!(kept.filter(|entry| entry.path().extension().is_some_and(|end| end == "products")).count(), 1);
        double.set("VERSION", 12_040);
        assert_eq!(started(&folder.path().join("older driver")), 3, "it cannot say what time is between two events");
    });
}
