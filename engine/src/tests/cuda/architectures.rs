//! Compiles all kernel families for each architecture, and generated kernels that cover every kind of operand. `gpu
//! compile` (benches/gpu) compiles the kernels of the models.

use rayon::prelude::*;

use super::fused::generated;
use crate::cuda::{Architecture, Cache, Family, Nvrtc};

/// The maximum size of a thread's spill stores and loads in bytes. It is the same as in `gpu compile`.
const MOST_SPILLED: u32 = 16;

#[test]
fn kernels_compile_for_every_architecture() {
    let nvrtc = match Nvrtc::load(None) {
        Ok(nvrtc) => nvrtc,
        Err(error) => {
            // If a library was named explicitly, it must be usable.
            assert!(std::env::var_os("GAPLESS_NVRTC_LIBRARY").is_none(), "{error}");
            return gapless_testing::not_checked(error);
        }
    };
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::new(folder.path());
    // .ci/kernels sets the architectures.
    let architectures =
        std::env::var("GAPLESS_TEST_ARCHITECTURES").unwrap_or_else(|_| "sm_80,sm_89,sm_90,sm_100,sm_120".into());
    let architectures: Vec<Architecture> = architectures.split(',').map(|name| name.parse().unwrap()).collect();
    let mut families: Vec<Family> = Family::ALL.iter().copied().chain(generated()).collect();
    // The longest sources are compiled first, so that all threads finish at about the same time.
    families.sort_by_key(|family| std::cmp::Reverse(family.source().len()));
    // Some families are for some of them alone.
    let of_all = |&family: &Family| {
        let able = architectures.iter().filter_map(move |architecture| architecture.of_family(family));
        able.map(move |architecture| (family, architecture))
    };
    let jobs: Vec<(Family, Architecture)> = families.iter().flat_map(of_all).collect();
    jobs.par_iter().for_each(|&(family, architecture)| {
        let kernels = cache.fill(nvrtc, family, architecture).unwrap_or_else(|error| panic!("{error}"));
        let is_generated = matches!(family, Family::Generated(_));
        assert!(
            if is_generated { kernels.len() == 1 } else { !kernels.is_empty() },
            "{family:?} for {architecture}: {kernels:?}"
        );
        let most = if is_generated { 0 } else { MOST_SPILLED };
        for kernel in &kernels {
            assert!(kernel.registers > 0, "for {architecture}: {kernel:?}");
            assert!(!kernel.is_serialized, "for {architecture}: {kernel:?}");
            assert!(kernel.spill_store_bytes.max(kernel.spill_load_bytes) <= most, "for {architecture}: {kernel:?}");
        }
        // The code is now in the cache.
        assert!(cache.load(nvrtc, family, architecture).unwrap().starts_with(b"\x7fELF"));
    });
    let entries = std::fs::read_dir(folder.path()).unwrap().count();
    assert_eq!(entries, jobs.len());
}
