//! Reading any bytes ends with a table or an error. A table that was read can be written, and reading it back gives the
//! same table.
#![no_main]

use gapless_alloc::{csv, lower_bound};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Ok(table) = csv::read(bytes) else { return };
    let mut text = Vec::new();
    table.write(&mut text, table.plan().as_deref()).expect("memory takes everything");
    let again = csv::read(&text[..]).expect("what was written can be read");
    assert_eq!(table.problem.buffers(), again.problem.buffers());
    assert_eq!((&table.gaps, &table.hints), (&again.gaps, &again.hints));
    if table.plan().is_some() {
        assert_eq!(table.offsets, again.offsets);
    }
    let pieces = table.pieces(false).expect("the gaps were checked");
    assert!(lower_bound(&pieces.problem) <= lower_bound(&table.problem));
    let _ = (table.pinned(), table.pieces(true));
});
