//! All families compile, and of generated kernels one for every kind of operand. The models' own kernels: `gpu compile` (benches/gpu).

use rayon::prelude::*;

use super::fused::generated;
use crate::cuda::{Architecture, Cache, Family, Nvrtc};

/// Bytes that a thread of a kernel may write to local memory, or read back, for want of registers: what `gpu compile` lets pass.
const MOST_SPILLED: u32 = 8;

#[test]
fn kernels_compile_for_every_architecture() {
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
    let mut families: Vec<Family> = Family::ALL.iter().copied().chain(generated()).collect();
    // The longest first, so that none of them is left over when the others are done.
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
        // What is kept is used.
        assert!(cache.load(nvrtc, family, architecture).unwrap().starts_with(b"\x7fELF"));
    });
    let entries = std::fs::read_dir(folder.path()).unwrap().count();
    assert_eq!(entries, jobs.len());
}
