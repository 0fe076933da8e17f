//! Whatever the bytes are, reading ends with a table or an error; a table that was read is written and read the same.
#![no_main]

use gapless_alloc::csv;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Ok(table) = csv::read(bytes) else { return };
    let mut text = Vec::new();
    csv::write(&mut text, &table.ids, &table.problem, table.offsets.as_deref()).expect("memory takes everything");
    let again = csv::read(&text[..]).expect("what was written can be read");
    assert_eq!(table.problem.buffers(), again.problem.buffers());
});
