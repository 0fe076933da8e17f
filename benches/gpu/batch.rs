//! The search for the largest micro-batch that fits: doubling until one does not fit, then bisection.

/// Returns the largest size that fits, starting at 1, with the result of `fits` for this size. Returns `None` if 1
/// does not fit. Assumes that if a size fits, every smaller size fits too.
///
/// # Errors
/// Returns the first error of `fits`.
pub fn largest<T, E>(mut fits: impl FnMut(usize) -> Result<Option<T>, E>) -> Result<Option<(usize, T)>, E> {
    let mut best = None;
    let (mut fitting, mut too_large) = (0, 1);
    while let Some(found) = fits(too_large)? {
        best = Some((too_large, found));
        fitting = too_large;
        let Some(doubled) = too_large.checked_mul(2) else { return Ok(best) };
        too_large = doubled;
    }
    while too_large - fitting > 1 {
        let middle = fitting + (too_large - fitting) / 2;
        match fits(middle)? {
            Some(found) => {
                best = Some((middle, found));
                fitting = middle;
            }
            None => too_large = middle,
        }
    }
    Ok(best)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_what_trying_all_finds_in_few_tries() {
        for most in 0..200 {
            let mut tries = 0;
            let found = largest(|size| {
                tries += 1;
                Ok::<_, ()>((size <= most).then_some(size * 10))
            });
            assert_eq!(found, Ok((most > 0).then_some((most, most * 10))));
            assert!(tries <= 2 + 2 * most.max(1).ilog2() as usize, "{tries} for {most}");
        }
    }

    #[test]
    fn an_error_ends_it() {
        assert_eq!(largest(|size| if size < 3 { Ok(Some(())) } else { Err(size) }), Err(4));
    }
}
