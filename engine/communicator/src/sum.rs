//! The one sum of all backends on the host: f32, in the order of ranks, so that bits depend on nothing else.

/// Elements summed at a time, on the stack.
const BLOCK: usize = 1 << 10;

/// Σ over ranks, in their order, of `len` elements, block by block into `put`. Every block is read by all before it is
/// put, so it may be put to where it came from.
///
/// # Safety
/// `source` gives aligned addresses that are valid for reads of `len` elements, which nobody but `put` writes.
pub(super) unsafe fn sum(
    ranks: usize,
    len: usize,
    source: impl Fn(usize) -> *const f32,
    mut put: impl FnMut(usize, &[f32]),
) {
    let mut block = [0.0f32; BLOCK];
    for at in (0..len).step_by(BLOCK) {
        let block = &mut block[..BLOCK.min(len - at)];
        // SAFETY: `at + block.len() ≤ len`, and nobody writes meanwhile; the block is on this thread's stack.
        unsafe {
            std::ptr::copy_nonoverlapping(source(0).add(at), block.as_mut_ptr(), block.len());
            for rank in 1..ranks {
                add(block, std::slice::from_raw_parts(source(rank).add(at), block.len()));
            }
        }
        put(at, block);
    }
}

/// Apart, so that the compiler knows the two as separate and adds many at a time.
fn add(block: &mut [f32], values: &[f32]) {
    block.iter_mut().zip(values).for_each(|(sum, value)| *sum += value);
}
