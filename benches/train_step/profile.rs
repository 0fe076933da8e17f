//! Prints how the time of a step is spent. The engine opens a span for each instruction, and this module sums the
//! spans' times.
//!
//! The CPU time of all threads stands beside the time that passed: their quotient is the number of cores at work.

use std::collections::BTreeMap;
use std::ops::AddAssign;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use cpu_time::ProcessTime;
use gapless::engine::compile::{InstrKind, Program};
use gapless::parallel::Rates;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};
use tracing_subscriber::registry::LookupSpan;

use crate::model::Model;
use crate::{Options, median, side, sorted};

/// Prints the time by kind of instruction, and by kind and layer.
pub fn run(options: &Options) -> anyhow::Result<()> {
    let profile = Profile::default();
    tracing::subscriber::set_global_default(tracing_subscriber::registry().with(profile.clone()))?;
    let dtype = if options.bf16 { candle_core::DType::BF16 } else { candle_core::DType::F32 };
    let mut trainer = side::trainer(options, dtype)?;
    let (tokens, targets) = side::batch(options);
    trainer.step(&tokens, &targets)?; // it warms the caches and touches memory for the first time
    profile.take();
    let (mut steps, mut whole) = (vec![], vec![]);
    for _ in 0..options.steps {
        let start = Instant::now();
        trainer.step(&tokens, &targets)?;
        whole.push(start.elapsed().as_secs_f64() * 1e3);
        steps.push(profile.take());
    }
    let whole = median(&sorted(whole.into_iter()));
    println!("a step, median of {}, threads: {}: {whole:.1} ms", steps.len(), trainer.threads());
    println!("{}", crate::describe(gapless::engine::kernels::cpu::peak::Peak::known()));
    let traffic = traffic(&Model::new(options).program(&side::step_options(options, dtype)?)?);
    print("instruction", whole, &steps, &traffic, |key| key.name.clone());
    print("instruction and layer", whole, &steps, &BTreeMap::new(), |key| {
        format!("{} {}", key.name, any_block(&key.layer))
    });
    Ok(())
}

/// Returns the bytes that each kind of instruction reads and writes in a step.
fn traffic(program: &Program) -> BTreeMap<String, u64> {
    // At this rate, a byte takes a nanosecond.
    let rates = Rates { flops: f64::MAX, bytes: 1e9 };
    let mut bytes = BTreeMap::new();
    for instr in &program.instrs {
        if let InstrKind::Compute(op) = &instr.kind {
            *bytes.entry(op.name().to_owned()).or_default() += instr.nanoseconds(&rates);
        }
    }
    bytes
}

/// Replaces the block index in a layer's name, so that all blocks are summed. For example, h.3.mlp becomes h.*.mlp.
fn any_block(layer: &str) -> String {
    let star = |part: &str| if part.parse::<usize>().is_ok() { "*".to_owned() } else { part.to_owned() };
    layer.split('.').map(star).collect::<Vec<_>>().join(".")
}

/// Prints a table of median times per step, longest first, and the rates of memory traffic where it is known.
fn print(title: &str, whole: f64, steps: &[Times], traffic: &BTreeMap<String, u64>, group: impl Fn(&Key) -> String) {
    let mut rows: BTreeMap<String, Vec<Spent>> = BTreeMap::new();
    for (index, times) in steps.iter().enumerate() {
        for (key, spent) in times {
            rows.entry(group(key)).or_insert_with(|| vec![Spent::default(); steps.len()])[index] += *spent;
        }
    }
    let mut rows: Vec<_> = rows
        .into_iter()
        .map(|(name, spent)| {
            let ms = |time: fn(&Spent) -> Duration| median(&sorted(spent.iter().map(|s| time(s).as_secs_f64() * 1e3)));
            (name, spent[0].calls, ms(|spent| spent.wall), ms(|spent| spent.cpu))
        })
        .collect();
    rows.sort_by(|a, b| b.2.total_cmp(&a.2));
    println!("\n{title:40}  calls   ms/step   share    CPU ms{}", if traffic.is_empty() { "" } else { "    GB/s" });
    for (name, calls, ms, cpu) in rows {
        let rate = traffic.get(&name).map_or(String::new(), |&bytes| format!("{:8.1}", bytes as f64 / ms / 1e6));
        println!("{name:40} {calls:6} {ms:9.2} {:6.1}% {cpu:9.2}{rate}", 100.0 * ms / whole);
    }
}

type Times = BTreeMap<Key, Spent>;

/// The time that the calls of an instruction took.
#[derive(Debug, Clone, Copy, Default)]
struct Spent {
    calls: usize,
    wall: Duration,
    /// CPU time of all threads.
    cpu: Duration,
}

impl AddAssign for Spent {
    fn add_assign(&mut self, other: Self) {
        self.calls += other.calls;
        self.wall += other.wall;
        self.cpu += other.cpu;
    }
}

/// An instruction of the program, without its micro-batch.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Key {
    name: String,
    layer: String,
}

impl Visit for Key {
    fn record_str(&mut self, field: &Field, value: &str) {
        match field.name() {
            "name" => self.name = value.into(),
            "layer" => self.layer = value.into(),
            _ => {}
        }
    }

    fn record_debug(&mut self, _: &Field, _: &dyn std::fmt::Debug) {}
}

/// Sums the time inside spans named `op`.
#[derive(Debug, Clone, Default)]
struct Profile {
    times: Arc<Mutex<Times>>,
}

/// The start of an instruction.
#[derive(Debug, Clone, Copy)]
struct Start(Instant, ProcessTime);

impl Profile {
    fn take(&self) -> Times {
        std::mem::take(&mut self.times.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl<S: tracing::Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Profile {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        if attributes.metadata().name() == "op" {
            let mut key = Key::default();
            attributes.record(&mut key);
            let span = context.span(id).expect("a new span is registered");
            span.extensions_mut().insert(key);
        }
    }

    fn on_enter(&self, id: &Id, context: Context<'_, S>) {
        let span = context.span(id).expect("an entered span is registered");
        span.extensions_mut().replace(Start(Instant::now(), ProcessTime::now()));
    }

    fn on_exit(&self, id: &Id, context: Context<'_, S>) {
        let span = context.span(id).expect("an exited span is registered");
        let extensions = span.extensions();
        if let (Some(key), Some(Start(wall, cpu))) = (extensions.get::<Key>(), extensions.get::<Start>()) {
            let spent = Spent { calls: 1, wall: wall.elapsed(), cpu: cpu.elapsed() };
            *self.times.lock().unwrap_or_else(PoisonError::into_inner).entry(key.clone()).or_default() += spent;
        }
    }
}
