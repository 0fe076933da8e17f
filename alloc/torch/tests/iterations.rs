//! A training job with a setup, gradients and optimizer states, whose iterations repeat or do not.

use gapless_testing::prelude::*;
use gapless_torch::{CountedPages, Device, Options};

/// A job with a setup, gradients that stay for an iteration, and an optimizer whose states are made in the first one.
struct Job {
    device: Device,
    /// Sizes of the parameters.
    sizes: Vec<u64>,
    states: bool,
}

impl Job {
    fn new(sizes: Vec<u64>) -> Self {
        let options = Options { check: true, wait_for_plan: true, saved_plan: None };
        let mut device = Device::new(0, Box::new(CountedPages::new(1 << 34)), options).unwrap();
        for &bytes in &sizes {
            let random = device.allocate(bytes * 2, 0).unwrap();
            device.allocate(bytes, 0).unwrap();
            device.free(random);
        }
        Self { device, sizes, states: true }
    }

    /// An iteration whose activations have so many times the parameters' bytes.
    fn iteration(&mut self, times: u64) {
        let device = &mut self.device;
        let mut request = |bytes| device.allocate(bytes, 0).unwrap();
        let activations: Vec<[u64; 2]> =
            self.sizes.iter().map(|&bytes| [request(bytes * times), request(4096)]).collect();
        let mut gradients = Vec::new();
        for (saved, &bytes) in activations.into_iter().zip(&self.sizes).rev() {
            let temporary = device.allocate(bytes * times, 0).unwrap();
            gradients.push(device.allocate(bytes, 0).unwrap());
            assert!(saved.into_iter().chain([temporary]).all(|address| device.free(address)));
        }
        if std::mem::take(&mut self.states) {
            for &bytes in &self.sizes {
                device.allocate(bytes, 0).unwrap();
                device.allocate(bytes, 0).unwrap();
            }
        }
        assert!(gradients.into_iter().all(|address| device.free(address)));
        device.step();
    }
}

generated! {
    #![cases(12)]

    /// The second iteration is predicted from the first, without the setup and without what stays, and what stays lies side
    /// by side: only whole pages, the first few requests of a run, and the place of a setup's largest request are lost.
    #[test]
    fn the_second_iteration_is_predicted(sizes in prop::collection::vec(1_000_000..9_000_000u64, 20..60)) {
        let largest = 2 * sizes.iter().max().unwrap();
        let mut job = Job::new(sizes);
        (0..5).for_each(|_| job.iteration(1));
        let report = job.device.report();
        prop_assert_eq!((report.plans, report.exact_iterations, report.deviations), (1, 4, 0));
        prop_assert_eq!(report.later_device_calls, 0);
        let most = report.most_requested + report.planned - report.lower_bound + (32 << 20) + largest;
        prop_assert!(report.most_reserved <= most, "{report:?}");
    }

    /// Iterations that do not repeat are served without a plan: the one that is predicted wrongly is given up. Two equal
    /// iterations have a plan again.
    #[test]
    fn iterations_that_do_not_repeat_have_no_plan(
        sizes in prop::collection::vec(1_000_000..9_000_000u64, 20..40),
        times in prop::collection::vec(2..6u64, 4..9),
    ) {
        let mut job = Job::new(sizes);
        job.iteration(1);
        for (turn, times) in times.into_iter().enumerate() {
            // No two in a row are equal.
            job.iteration(if turn % 2 == 0 { times } else { times + 5 });
            prop_assert_eq!(job.device.report().planned, 0);
        }
        let report = job.device.report();
        prop_assert_eq!((report.plans, report.exact_iterations), (1, 0));
        (0..4).for_each(|_| job.iteration(1));
        prop_assert!(job.device.report().plans == 2, "{:?}", job.device.report());
    }
}

/// A tensor that is kept from a deviation on may lie in the plan's region. Two equal iterations later the plan has another.
#[test]
fn a_kept_tensor_moves_the_plan() {
    let mut job = Job::new(vec![3 << 20; 8]);
    (0..3).for_each(|_| job.iteration(1));
    let kept = job.device.allocate(5 << 20, 0).unwrap();
    (0..2).for_each(|_| job.iteration(1));
    let before = job.device.report();
    (0..3).for_each(|_| job.iteration(1));
    let report = job.device.report();
    assert_eq!((report.plans, report.exact_iterations), (before.plans + 1, before.exact_iterations + 2), "{report:?}");
    assert!(report.reserved < report.alive + report.planned + (24 << 20), "{report:?}");
    assert!(job.device.free(kept));
}

/// A setup that needs more bytes than the iterations (a model in f32 that becomes bf16) takes none from them.
#[test]
fn a_large_setup_keeps_no_bytes() {
    const MIB: u64 = 1 << 20;
    let options = Options { check: true, wait_for_plan: true, saved_plan: None };
    let mut device = Device::new(0, Box::new(CountedPages::new(1 << 30)), options).unwrap();
    let wide = device.allocate(80 * MIB, 0).unwrap();
    device.allocate(40 * MIB, 0).unwrap();
    device.free(wide);
    for _ in 0..4 {
        let saved = [20, 10].map(|mib| device.allocate(mib * MIB, 0).unwrap());
        assert!(saved.into_iter().all(|address| device.free(address)));
        device.step();
    }
    let report = device.report();
    assert_eq!((report.planned, report.lower_bound, report.reserved), (30 * MIB, 30 * MIB, 70 * MIB), "{report:?}");
    assert_eq!((report.plans, report.exact_iterations, report.deviations), (1, 3, 0), "{report:?}");
}

/// A program that catches the error of the second iteration's first request goes on. The prediction is cut off at its
/// first request only while play is exact.
#[test]
fn a_refused_first_request_leaves_the_prediction_whole() {
    const MIB: u64 = 1 << 20;
    let options = Options { check: true, wait_for_plan: true, saved_plan: None };
    let mut device = Device::new(0, Box::new(CountedPages::new(128 * MIB)), options).unwrap();
    let setup = device.allocate(8 * MIB, 0).unwrap();
    device.free(setup);
    let iteration = |device: &mut Device, second| {
        let saved = [20, second].map(|mib| device.allocate(mib * MIB, 0).unwrap());
        assert!(saved.into_iter().all(|address| device.free(address)));
        device.step();
    };
    iteration(&mut device, 10);
    device.allocate(256 * MIB, 0).unwrap_err();
    iteration(&mut device, 6);
    (0..4).for_each(|_| iteration(&mut device, 10));
    assert_eq!(device.report().exact_iterations, 2, "{:?}", device.report());
}
