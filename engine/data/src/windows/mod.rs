//! Windows of a stream, which assign tokens to batches.

mod cut;
#[cfg(test)]
mod tests;
mod training;
mod validation;

use crate::DataError;

pub(crate) use cut::WindowSource;
pub use training::TrainingWindows;
pub use validation::ValidationWindows;

/// Splits `count` among the parts by their weights. Each part gets at least one, so the total exceeds `count` if there
/// are more than `count` parts.
fn shares(parts: &[(WindowSource, f64)], count: usize) -> Vec<usize> {
    let all: f64 = parts.iter().map(|(_, weight)| weight).sum();
    let (mut weights, mut given) = (0.0, 0);
    let mut shares = Vec::with_capacity(parts.len());
    for (index, (_, weight)) in parts.iter().enumerate() {
        weights += weight;
        // Each of the following parts must still get at least one.
        let most = count.saturating_sub(parts.len() - 1 - index).max(given + 1);
        let end = ((count as f64 * weights / all).round() as usize).clamp(given + 1, most);
        shares.push(end - given);
        given = end;
    }
    shares
}

/// Writes windows `first..` into the slices. `windows` is the total number of windows. `start` returns the part and the
/// start of the window with the given index.
fn fill<'a>(
    sequence: usize,
    windows: usize,
    first: usize,
    start: impl Fn(usize) -> (&'a WindowSource, u64),
    inputs: &mut [u32],
    targets: &mut [u32],
) -> Result<(), DataError> {
    let count = inputs.len() / sequence;
    let whole = inputs.len() == targets.len() && inputs.len() == count * sequence;
    if !whole || first.checked_add(count).is_none_or(|end| end > windows) {
        let (inputs, targets) = (inputs.len(), targets.len());
        return Err(DataError::Slices { inputs, targets, first, sequence, windows });
    }
    let slices = inputs.chunks_exact_mut(sequence).zip(targets.chunks_exact_mut(sequence));
    for (index, (inputs, targets)) in (first..).zip(slices) {
        let (cut, start) = start(index);
        cut.fill(start, inputs, targets)?;
    }
    Ok(())
}

/// Writes the start of each token's document to `starts`, for windows that are already filled.
fn documents<'a>(
    sequence: usize,
    start: impl Fn(usize) -> (&'a WindowSource, u64),
    inputs: &[u32],
    targets: &mut [u32],
    starts: &mut [u32],
) -> Result<(), DataError> {
    let windows = inputs.chunks_exact(sequence).zip(targets.chunks_exact_mut(sequence));
    for (index, ((inputs, targets), starts)) in windows.zip(starts.chunks_exact_mut(sequence)).enumerate() {
        let (cut, start) = start(index);
        cut.documents(start, inputs, targets, starts)?;
    }
    Ok(())
}
