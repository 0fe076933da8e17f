//! Valid and invalid snapshots, written by Python's pickle module (`snapshots/make.py`).

use std::io::Cursor;
use std::path::Path;

use gapless_allocators::Stream;
use gapless_allocators::{Snapshot, SnapshotError, read_snapshot};
use gapless_testing::prelude::*;

fn file(name: &str) -> Vec<u8> {
    std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/snapshots").join(name)).unwrap()
}

fn read(name: &str, device: Option<usize>) -> Result<Snapshot, SnapshotError> {
    read_snapshot(Cursor::new(file(&format!("{name}.pickle"))), device)
}

/// The `(start, end, bytes, stream)` of every allocation.
fn rows(snapshot: &Snapshot) -> Vec<(u64, u64, u64, u32)> {
    let buffers = snapshot.problem.buffers().iter().zip(&snapshot.streams);
    buffers.map(|(b, &Stream(stream))| (b.lifetime.start, b.lifetime.end, b.bytes, stream)).collect()
}

#[test]
fn lifetimes_are_those_of_the_events() {
    const MIB: u64 = 1 << 20;
    for name in ["step", "step_protocol2", "step_protocol3", "step_protocol5", "hostile"] {
        let snapshot = read(name, None).unwrap();
        let expected = [
            (0, 2, 100, 0),      // from before the recording to its second event
            (3, 7, 3 * MIB, 0),  // until the other stream was done
            (4, 10, 5 * MIB, 1), // never freed
            (6, 10, 200, 0),     // at an address used before
            (8, 9, 1, 0),        // freed, not completed
            (0, 10, 1000, 0),    // neither allocated nor freed while recording
        ];
        assert_eq!(rows(&snapshot), expected, "{name}");
        assert_eq!((snapshot.device, snapshot.reserved), (0, 22 * MIB), "{name}");
    }
}

/// A refused request in the middle of a trace, and the program up to this request.
#[test]
fn a_refused_request_is_told_with_the_device_as_it_was() {
    const MIB: u64 = 1 << 20;
    let snapshot = read("step", None).unwrap();
    let [refused] = &snapshot.refused[..] else { panic!("{:?}", snapshot.refused) };
    assert_eq!((refused.event, refused.tick, refused.bytes, refused.device_free), (9, 7, 1 << 40, 0));
    assert_eq!((refused.reserved, refused.capacity()), (22 * MIB, 22 * MIB));
    assert_eq!(refused.allocated, 5 * MIB + 200 + 1000);
    let until = snapshot.until(refused).unwrap();
    let expected = [
        (0, 2, 100, 0),
        (3, 7, 3 * MIB, 0),
        (4, 9, 5 * MIB, 1),
        (6, 9, 200, 0),
        (0, 9, 1000, 0),
        (8, 9, 1 << 40, 0), // the request itself
    ];
    assert_eq!(rows(&until), expected);
}

#[test]
fn errors_say_what_is_wrong() {
    let check = |name: &str, device: Option<usize>, expected: &str| {
        let error = read(name, device).unwrap_err().to_string();
        assert!(error.contains(expected), "{name}: {error}");
    };
    check("two_devices", None, "several devices have traces; choose one of [0, 1]");
    check("two_devices", Some(2), "device 2 has no trace; choose one of [0, 1]");
    assert!(read("two_devices", Some(1)).is_ok());
    check("no_trace", None, "no allocation was recorded");
    check("not_a_snapshot", None, "not a memory snapshot");
    check("double_free", None, "event 3 of device 0: address 0x7f0000000000 is freed twice");
    check("double_alloc", None, "event 1 of device 0: address 0x7f0000000000 is allocated twice");
    check("negative_size", None, "event 0 of device 0: size -9 is negative");
    check("call", None, "only plain data");
    check("loop", None, "an event has no action");
}

#[test]
fn a_file_cut_anywhere_is_an_error() {
    let whole = file("step.pickle");
    for end in 0..whole.len() {
        let error = read_snapshot(&whole[..end], None).unwrap_err();
        assert!(matches!(error, SnapshotError::Truncated { .. }), "cut at {end}: {error}");
    }
}

generated! {
    /// Reading any bytes ends with a snapshot or an error.
    #[test]
    fn no_bytes_break_the_reader(changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8)) {
        let mut bytes = file("step.pickle");
        for (at, byte) in changes {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        let _ = read_snapshot(Cursor::new(bytes), None);
    }
}
