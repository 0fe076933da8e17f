//! Sorting that is compiled once per element type instead of once per key. The 40 sort keys of this crate would
//! otherwise make up a fifth of its code.

use std::cmp::Ordering;

/// Sorts by a key as [`slice::sort_by_key`] does: elements of equal keys stay in their order.
pub(crate) fn sort_by_key<T, K: Ord>(elements: &mut [T], key: impl Fn(&T) -> K) {
    sort_by(elements, &|a, b| key(a).cmp(&key(b)));
}

fn sort_by<T>(elements: &mut [T], order: &dyn Fn(&T, &T) -> Ordering) {
    elements.sort_by(order);
}
