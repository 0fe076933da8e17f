//! Activations that are compressed, or offloaded to the host, between forward and backward.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use candle_core::{DType, Layout};
use gapless_graph::Stream;

use super::judge::{Stored, judge};
use super::mixture::{Mixture, mixtures};
use super::processor::{Processor, device};
use super::small::{Small, Style};
use super::trainer::{expect_near, numbers, options, step};
use super::{gpu, host};
use crate::cuda::Launch;
use crate::graph::Spec;
use crate::nn::VarBuilder;
use crate::ops::{Compress, Expand, packed};
use crate::runtime::{Error as RuntimeError, Session};
use crate::{MemoryOptions, Model, Op, Result, StepOptions, TrainError, TrainOptions, Trainer};

/// Elements of a group that are whole multiples of the group's step have exact codes, whatever the order of rounding.
#[test]
fn elements_are_compressed_and_restored() {
    if !host::is_there() {
        return;
    }
    // Groups of whole packs, rows of other lengths, and several groups per row.
    for dims in [&[2, 4, 128][..], &[3, 5, 7], &[2, 300], &[2, 520]] {
        for dtype in [DType::F32, DType::BF16] {
            let spec = Spec { shape: dims.to_vec().into(), dtype };
            let data = (0..spec.elements()).map(|i| match i % 7 {
                0 => 0.0,
                1 => 255.0,
                _ => (i * 37 % 256) as f64,
            });
            let of = |data: Vec<f64>, spec: &Spec| Stored {
                data,
                layout: Layout::contiguous(spec.shape.clone()),
                dtype: spec.dtype,
            };
            let whole = packed(&spec);
            let stream = Stream::new(1, 1, 0);
            let x = of(data.collect(), &spec);
            assert!(judge(&Compress, &[x], std::slice::from_ref(&spec), &whole, stream));
            let elements = |spec: &Spec, f: &dyn Fn(usize) -> f64| of((0..spec.elements()).map(f).collect(), spec);
            let inputs = [elements(&whole[0], &|i| (i % 256) as f64), elements(&whole[1], &|i| 0.25 * (i % 9) as f64)];
            assert!(judge(
                &Expand(spec.clone()),
                &inputs,
                &whole,
                &Expand(spec.clone()).infer(&whole).unwrap(),
                stream
            ));
        }
    }
}

fn trainer(change: impl FnOnce(&mut MemoryOptions), is_on_device: bool) -> Trainer {
    let mut memory = MemoryOptions::default();
    change(&mut memory);
    let options = TrainOptions { step: StepOptions { micro_batches: 2, memory, ..options().step }, ..options() };
    let builder = Trainer::builder(|vb| Small::new(Style::Gpt, vb), options);
    if is_on_device { builder.on_device(device()) } else { builder }.build().unwrap()
}

/// A step whose offload file fails does not change the model: the error names the file, and the trainer is as before the
/// step. The values that could not be read back are finite, so no value tells that the step has failed.
#[test]
fn a_step_whose_file_fails_changes_nothing() {
    // Only the simulated device has a file that fails.
    if gpu::is_asked_for() || !host::is_there() {
        return;
    }
    expect_unchanged(|vb| Small::new(Style::Gpt, vb), &["linear", "attention"]);
    // The experts of each token are integers.
    let (_, is_shared, router) = &mixtures()[0];
    expect_unchanged(|vb| Mixture::new(router, *is_shared, vb), &["linear", "route"]);
}

fn expect_unchanged<M: Model>(build: impl Fn(VarBuilder) -> Result<M>, offload: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    let offload_to = Some(folder.path().into());
    let memory = MemoryOptions { offload: names(offload), offload_to, ..MemoryOptions::default() };
    let options = TrainOptions { step: StepOptions { micro_batches: 2, memory, ..options().step }, ..options() };
    let trainer = |good: &Arc<AtomicUsize>| {
        let builder = Trainer::builder(&build, options.clone());
        builder.on_device(Box::new(Processor::with_file(good.clone()))).build().unwrap()
    };
    let [always, good] = [usize::MAX, usize::MAX].map(|good| Arc::new(AtomicUsize::new(good)));
    let (mut reference, mut failing) = (trainer(&always), trainer(&good));
    let expect_same = |reference: &Trainer, failing: &Trainer| {
        assert_eq!(reference.steps(), failing.steps());
        for tensor in reference.session.executable().persistent() {
            let name = &tensor.label.tensor;
            let [expected, got] = [reference, failing].map(|trainer| numbers(&trainer.session.tensor(name).unwrap()));
            assert_eq!(expected, got, "{name}");
        }
    };
    // The number of copies of a step is that of the launches that start one.
    let launches = Session::launches(failing.session.executable()).unwrap();
    let copies = launches.iter().filter(|launch| matches!(launch, Launch::Copy(_))).count();
    for left in [copies - 1, 0, copies / 2] {
        assert_eq!(step(&mut reference).unwrap(), step(&mut failing).unwrap());
        good.store(left, Ordering::Relaxed);
        let error = step(&mut failing).unwrap_err();
        assert!(matches!(error, TrainError::Runtime(RuntimeError::Offload { .. })), "{error}");
        assert!(error.to_string().contains("memory.offload_to"), "{error}");
        good.store(usize::MAX, Ordering::Relaxed);
        expect_same(&reference, &failing);
    }
    assert_eq!(step(&mut reference).unwrap(), step(&mut failing).unwrap());
    expect_same(&reference, &failing);
}

fn names(all: &[&str]) -> Vec<String> {
    all.iter().map(|name| (*name).to_owned()).collect()
}

/// Steps with compressed activations have the losses of the CPU.
#[test]
fn compressed_steps_are_those_of_the_cpu() {
    if !host::is_there() {
        return;
    }
    let [mut cpu, mut gpu] =
        [false, true].map(|is_on_device| trainer(|memory| memory.compress = names(&["linear", "gelu"]), is_on_device));
    for _ in 0..12 {
        let (on_cpu, on_gpu) = (step(&mut cpu).unwrap(), step(&mut gpu).unwrap());
        expect_near("the loss", on_gpu[0], on_cpu[0], super::gpu::allowed(2e-5, 2e-4) as f32);
    }
}

/// Steps that offload have the losses of steps that do not, up to the rounding of operations that are not fused around a
/// copy. Host memory and a file give the same bits, recorded and launch by launch. The plan of the host has the bytes
/// that it has on the CPU.
#[test]
fn offloaded_steps_are_those_without() {
    if !host::is_there() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let offload = |memory: &mut MemoryOptions| memory.offload = names(&["linear", "attention"]);
    let mut kept = trainer(|_| {}, true);
    let mut in_memory = trainer(offload, true);
    let in_file = |memory: &mut MemoryOptions| {
        offload(memory);
        memory.offload_to = Some(folder.path().into());
    };
    let mut in_file = trainer(in_file, true);
    let bytes = in_memory.report().host_bytes;
    assert!(bytes > 0 && bytes == trainer(offload, false).report().host_bytes);
    for index in 0..12 {
        let expected = step(&mut kept).unwrap();
        if index == 3 {
            let [tokens, targets] = super::trainer::batch(index);
            let times = in_memory.profile(&tokens, &targets).unwrap();
            for operation in ["offloaded", "fetched"] {
                assert!(times.iter().any(|timed| timed.operation == operation), "{operation}");
            }
            step(&mut in_file).unwrap();
            continue;
        }
        let got = step(&mut in_memory).unwrap();
        assert_eq!(step(&mut in_file).unwrap(), got);
        got.iter().zip(expected).for_each(|(&got, expected)| expect_near("loss or norm", got, expected, 2e-5));
    }
}
