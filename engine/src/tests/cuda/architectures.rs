//! Every kernel compiles, for the oldest and the newest GPUs that are meant.

use super::fused::generated;
use crate::cuda::{Architecture, Cache, Family, Nvrtc};

const ARCHITECTURES: [Architecture; 3] =
    [Architecture { major: 8, minor: 0 }, Architecture { major: 9, minor: 0 }, Architecture { major: 10, minor: 0 }];

#[test]
fn every_kernel_compiles_for_every_architecture() {
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
    let families: Vec<Family> = Family::ALL.iter().copied().chain(generated()).collect();
    let jobs: Vec<(Family, Architecture)> =
        families.iter().flat_map(|&family| ARCHITECTURES.map(|architecture| (family, architecture))).collect();
    use rayon::prelude::*;
    jobs.into_par_iter().for_each(|(family, architecture)| {
        let code = cache.load(nvrtc, family, architecture).unwrap_or_else(|error| panic!("{error}"));
        assert!(code.starts_with(b"\x7fELF"), "{family:?} for {architecture}");
        // From the cache it is the same.
        assert!(cache.load(nvrtc, family, architecture).unwrap() == code);
    });
    let entries = std::fs::read_dir(folder.path()).unwrap().count();
    assert_eq!(entries, families.len() * ARCHITECTURES.len());
}
