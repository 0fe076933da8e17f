//! The models of PyTorch's allocator, compared byte for byte with the real allocator on recorded training steps.

use std::fs::File;

use gapless_alloc::{csv, lower_bound};
use gapless_allocators::{Device, PyTorch, PyTorchOptions};
use gapless_allocators::{Requests, replay, smallest_capacity};
use serde_json::Value;

#[test]
fn every_recording_is_met_to_the_byte() {
    let folder = gapless_testing::evidence("pytorch");
    let manifest: Value = serde_json::from_reader(File::open(folder.join("manifest.json")).unwrap()).unwrap();
    let mut wrong = Vec::new();
    let mut compared = 0;
    for trace in manifest.as_array().unwrap() {
        for (part, replays, iterations) in [("iteration", "replay_3_iterations", 3), ("full", "replay_1_iteration", 1)]
        {
            let Some(part) = trace.get(part) else { continue };
            let file = part["file"].as_str().unwrap();
            let table = csv::read(gapless_testing::open(&folder.join(file)).unwrap()).unwrap();
            let requests = Requests::new(&table.problem);
            for (mode, expected) in part[replays].as_object().unwrap() {
                let options = match mode.as_str() {
                    "default" => PyTorchOptions::default(),
                    "expandable" => PyTorchOptions::expandable(),
                    other => panic!("unknown mode {other}"),
                };
                let allocator = |capacity| PyTorch::new(Device::new(capacity), options.clone());
                let mut at_large = allocator(Device::DEFAULT_CAPACITY);
                let report = replay(&requests, &mut at_large, iterations).unwrap();
                let mut compare = |field: &str, ours: u64| {
                    compared += 1;
                    let theirs = expected[field].as_u64().unwrap();
                    if ours != theirs {
                        wrong.push(format!("{file} {mode}: {field} {ours}, recorded {theirs}"));
                    }
                };
                compare("live_peak", lower_bound(&table.problem));
                compare("peak_allocated", report.peak_allocated());
                compare("peak_reserved", report.peak_reserved());
                compare("segments_end", report.statistics.segments);
                compare("num_device_alloc", report.statistics.device_allocations);
                let (capacity, tight) = smallest_capacity(&requests, iterations, report.peak_reserved(), |capacity| {
                    Box::new(allocator(capacity))
                })
                .unwrap();
                compare("min_capacity", capacity);
                compare("min_capacity_retries", tight.statistics.retries);
            }
        }
    }
    println!("{compared} figures compared");
    assert!(wrong.is_empty(), "{} of {compared} figures differ:\n{}", wrong.len(), wrong.join("\n"));
}
