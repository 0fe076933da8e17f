//! Generated kernels compile, of every kind of operand. Families and the models' own kernels: `gpu compile` (benches/gpu).

use rayon::prelude::*;

use super::fused::generated;
use crate::cuda::{Architecture, Cache, Family, Nvrtc};

#[test]
fn generated_kernels_compile_for_every_architecture() {
    let nvrtc = match Nvrtc::load(None) {
        Ok(nvrtc) => nvrtc,
        Err(error) => {
            // Whoever names a library has one.
            assert!(std::env::var_os("GAPLESS_NVRTC_LIBRARY").is_none(), "{error}");
            return gapless_testing::not_checked(error);
        }
    };
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::new(folder.path());
    // .ci/kernels says for which.
    let architectures = std::env::var("GAPLESS_TEST_ARCHITECTURES").unwrap_or_else(|_| "sm_80,sm_90,sm_100".into());
    let architectures: Vec<Architecture> = architectures.split(',').map(|name| name.parse().unwrap()).collect();
    let families = generated();
    let of_all = |&family| architectures.iter().map(move |&architecture| (family, architecture));
    let jobs: Vec<(Family, Architecture)> = families.iter().flat_map(of_all).collect();
    jobs.into_par_iter().for_each(|(family, architecture)| {
        let kernels = cache.fill(nvrtc, family, architecture).unwrap_or_else(|error| panic!("{error}"));
        assert!(kernels.len() == 1 && kernels[0].registers > 0, "{family:?} for {architecture}: {kernels:?}");
        assert_eq!((kernels[0].spill_store_bytes, kernels[0].spill_load_bytes), (0, 0), "{kernels:?}");
        // What is kept is used.
        assert!(cache.load(nvrtc, family, architecture).unwrap().starts_with(b"\x7fELF"));
    });
    let entries = std::fs::read_dir(folder.path()).unwrap().count();
    assert_eq!(entries, families.len() * architectures.len());
}
