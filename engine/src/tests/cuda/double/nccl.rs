//! Tests of ranks that exchange tensors by NCCL, each with a device of its own.

use gapless_alloc::arena::Reserve;

use std::sync::Barrier;

use gapless_parallel::Mesh;
use gapless_testing::few;

use super::{Double, judge};
use crate::communicator::{Communicator, on_threads};
use crate::cuda::{Cache, Device, Nvidia};
use crate::nn::RouterConfig;
use crate::tests::cuda::mixture::Mixture;
use crate::tests::cuda::ranks::{Wide, compare, compare_divided, compare_in_bf16, mesh, quick};
use crate::tests::cuda::small::{Small, Style};
use crate::tests::cuda::trainer::step;
use crate::{MemoryOptions, Overflow, StepOptions, TrainError, TrainOptions, Trainer};

/// Returns the device of a rank.
fn own(rank: usize) -> Box<dyn Device> {
    Box::new(Nvidia::new(rank, Cache::of_user()).expect("the double has as many"))
}

/// Stages, data ranks and expert ranks compute the same on devices as on CPUs.
#[test]
fn ranks_exchange_by_nccl() {
    judge(module_path!(), "ranks_exchange_by_nccl", |double| {
        double.set("DEVICES", 4);
        let options =
            TrainOptions { step: StepOptions { mesh: mesh(2, 2, 1), micro_batches: 2, ..quick().step }, ..quick() };
        compare("data ranks and stages", &options, own, |vb| Small::new(Style::Llama, vb));
        // NCCL determines the order of sums over more than two ranks.
        compare(
            "shared states",
            &TrainOptions { step: StepOptions { mesh: mesh(4, 1, 1), ..quick().step }, ..quick() },
            own,
            Wide::new,
        );
        let config = RouterConfig { experts: 4, balance_loss: 0.1, z_loss: 0.01, ..RouterConfig::default() };
        let experts = || {
            for (routing, overflow) in [
                (Reserve::Worst, Overflow::Error),
                (Reserve::Bytes(0), Overflow::Grow),
                (Reserve::Balanced { factor: 0.0 }, Overflow::Recompute),
            ] {
                let options = TrainOptions {
                    step: StepOptions {
                        mesh: mesh(2, 1, 2),
                        memory: MemoryOptions { routing, overflow, ..quick().step.memory },
                        ..quick().step
                    },
                    ..quick()
                };
                let what = format!("experts, {routing:?}, {overflow:?}");
                compare(&what, &options, own, |vb| Mixture::new(&config, false, vb));
            }
        };
        let others: [&dyn Fn(); 2] = [&experts, &|| compare_in_bf16(own)];
        few(&others, 0).iter().for_each(|compare| compare());
        let calls = double.calls();
        for name in ["ncclSend", "ncclRecv", "ncclAllReduce", "ncclReduceScatter", "ncclAllGather"] {
            assert!(calls.iter().any(|(call, _)| call == name), "{name} is not called: {calls:?}");
        }
    });
}

/// Tensor, context and folded ranks compute the same on devices as on CPUs.
#[test]
fn divided_ranks_exchange_by_nccl() {
    judge(module_path!(), "divided_ranks_exchange_by_nccl", |double| {
        double.set("DEVICES", 4);
        compare_divided(own);
        let calls = double.calls();
        for name in ["ncclSend", "ncclRecv", "ncclAllReduce", "ncclReduceScatter", "ncclAllGather"] {
            assert!(calls.iter().any(|(call, _)| call == name), "{name} is not called: {calls:?}");
        }
    });
}

/// Two ranks that share a device exchange through host memory.
#[test]
fn ranks_on_one_device_exchange_through_the_host() {
    judge(module_path!(), "ranks_on_one_device_exchange_through_the_host", |double| {
        let options = TrainOptions { step: StepOptions { mesh: mesh(2, 1, 1), ..quick().step }, ..quick() };
        compare("one device", &options, |_| own(0), |vb| Small::new(Style::Gpt, vb));
        assert!(double.calls().iter().all(|(call, _)| !call.starts_with("ncclComm")), "NCCL is asked");
    });
}

/// Makes a call of NCCL fail in the second step, and checks that the errors of all ranks name it.
fn expect_told(double: &Double, style: Style, mesh: Mesh, call: &str) {
    const INVALID_USAGE: i32 = 5;
    let options = TrainOptions { step: StepOptions { mesh, micro_batches: 2, ..quick().step }, ..quick() };
    let ranks = mesh.ranks().unwrap();
    double.set("DEVICES", ranks as u64);
    let together = Barrier::new(ranks);
    let errors = on_threads(ranks, |world: Box<dyn Communicator>| {
        let rank = world.rank();
        let mut trainer = Trainer::builder(|vb| Small::new(style, vb), options.clone())
            .distributed(world)
            .on_device(own(rank))
            .build()?;
        step(&mut trainer)?;
        together.wait();
        double.fail(call, 1, INVALID_USAGE);
        together.wait();
        let error = step(&mut trainer).unwrap_err();
        Ok::<_, TrainError>(error.to_string())
    });
    let errors = errors.unwrap();
    assert!(errors.iter().all(|error| error.contains(call)), "{errors:?}");
}

/// If a call fails on one rank, all ranks report the failure.
#[test]
fn a_failure_of_nccl_is_told_to_the_others() {
    judge(module_path!(), "a_failure_of_nccl_is_told_to_the_others", |double| {
        expect_told(double, Style::Gpt, mesh(1, 2, 1), "ncclRecv");
    });
}

/// One rank fails while several communicators have operations running, and other ranks wait for all of these
/// operations. No rank takes the aborted operations for a completed step.
#[test]
fn a_failure_ends_all_communicators() {
    judge(module_path!(), "a_failure_ends_all_communicators", |double| {
        expect_told(double, Style::Llama, mesh(2, 2, 1), "ncclAllReduce");
    });
}
