//! The C interface, called by four threads on three streams. Every request is checked against all living ones.

use std::ffi::{CStr, c_void};
use std::sync::Barrier;

use gapless_torch::ffi::{
    gapless_torch_alloc, gapless_torch_empty_cache, gapless_torch_free, gapless_torch_rehearse, gapless_torch_report,
    gapless_torch_step,
};

const STREAMS: [usize; 3] = [0, 0x7000, 0x9000];

/// A number that looks random (SplitMix64).
fn next(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let mixed = (*state ^ (*state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    mixed ^ (mixed >> 31)
}

fn allocate(bytes: usize, device: i32, stream: usize) -> *mut c_void {
    gapless_torch_alloc(bytes as isize, device, stream as *mut c_void)
}

/// One iteration that always asks for the same.
fn iteration() {
    let mut living: Vec<(*mut c_void, usize)> = Vec::new();
    let mut random = 1;
    for _ in 0..400 {
        if next(&mut random).is_multiple_of(3) && !living.is_empty() {
            let at = next(&mut random) as usize % living.len();
            let (pointer, bytes) = living.swap_remove(at);
            gapless_torch_free(pointer, bytes, 0, std::ptr::null_mut());
        } else {
            let (bytes, stream) = (next(&mut random) as usize % (9 << 20) + 1, STREAMS[next(&mut random) as usize % 2]);
            living.push((allocate(bytes, 0, stream), bytes));
        }
    }
    for (pointer, bytes) in living {
        assert!(!pointer.is_null());
        gapless_torch_free(pointer, bytes, 0, std::ptr::null_mut());
    }
    gapless_torch_step();
}

/// Random requests and frees of a thread, on all streams.
fn chaos(seed: u64, operations: usize) {
    let mut random = seed;
    let mut living: Vec<(*mut c_void, usize)> = Vec::new();
    for _ in 0..operations {
        if next(&mut random).is_multiple_of(2) && !living.is_empty() {
            let at = next(&mut random) as usize % living.len();
            let (pointer, bytes) = living.swap_remove(at);
            gapless_torch_free(pointer, bytes, 0, std::ptr::null_mut());
        } else {
            let most = 1 << (9 + next(&mut random) % 15);
            let (bytes, stream) = (next(&mut random) as usize % most, STREAMS[next(&mut random) as usize % 3]);
            let pointer = allocate(bytes, 0, stream);
            if !pointer.is_null() {
                assert!((pointer as usize).is_multiple_of(512));
                living.push((pointer, bytes));
            }
        }
        match next(&mut random) % 4096 {
            0 => gapless_torch_empty_cache(),
            1 => gapless_torch_step(),
            _ => {}
        }
    }
    for (pointer, bytes) in living {
        gapless_torch_free(pointer, bytes, 0, std::ptr::null_mut());
    }
}

fn report() -> String {
    let mut text = vec![0u8; 1 << 16];
    // SAFETY: all bytes of the vector are writable.
    unsafe { gapless_torch_report(text.as_mut_ptr().cast(), text.len()) };
    CStr::from_bytes_until_nul(&text).unwrap().to_str().unwrap().to_owned()
}

fn figure(name: &str) -> u64 {
    let report = report();
    let (_, rest) = report.split_once(&format!("\"{name}\":")).unwrap();
    rest.split([',', '}']).next().unwrap().parse().unwrap()
}

#[test]
fn living_requests_share_no_byte() {
    gapless_torch_rehearse(8 << 30);
    // Of each thread in each round. With 833,000, the test has 10^7 requests and frees and takes minutes.
    let operations = std::env::var("GAPLESS_TORCH_OPERATIONS").map_or(20_000, |count| count.parse().unwrap());
    for round in 0..3 {
        for _ in 0..6 {
            iteration();
        }
        assert!(figure("exact_iterations") >= 3 * (round + 1), "{}", report());
        let barrier = Barrier::new(4);
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let barrier = &barrier;
                scope.spawn(move || {
                    barrier.wait();
                    chaos(100 * round + thread, operations);
                });
            }
        });
        gapless_torch_step();
        assert_eq!(figure("alive"), 0);
    }
    // More than the device has: null, and a text. The next request is served.
    assert!(allocate(9 << 30, 0, 0).is_null());
    // SAFETY: the text is valid until this thread's next error.
    let text = unsafe { CStr::from_ptr(gapless_torch::ffi::gapless_torch_error()) }.to_str().unwrap().to_owned();
    assert!(text.contains("out of memory on CUDA device 0: 9663676416 bytes were requested"), "{text}");
    let pointer = allocate(1 << 30, 0, 0);
    assert!(!pointer.is_null());
    gapless_torch_free(pointer, 1 << 30, 0, std::ptr::null_mut());
    // Another device has a memory of its own; one that cannot exist has none.
    assert!(!allocate(7 << 30, 1, 0).is_null());
    assert!(allocate(1, 64, 0).is_null() && allocate(1, -1, 0).is_null());
    gapless_torch_free(0x1234 as *mut c_void, 1, 0, std::ptr::null_mut());
}
