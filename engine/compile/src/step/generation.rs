//! The programs that continue sequences: `prefill` reads a prompt chunk by chunk, `decode` reads one token at a time.
//!
//! Both programs are the model's forward over tokens whose positions are an input. These tokens attend to earlier keys
//! and values in a cache ([`Sequences::Continued`]). The two programs differ only in the number of tokens. No
//! operation's order of summation depends on that number, so the logits have the same bits as those of a forward over
//! whole sequences.

use std::collections::HashMap;

use candle_core::DType;
use gapless_alloc::Role;
use gapless_graph::{Culprit, Sequences, Spec, Tensor, cache_obstacle};

use super::record::{Held, Trace};
use super::{Build, CheckpointLayout, CompiledStep, Logits, RankPlan, StepOptions, evaluation, forward};
use crate::Executable;
use crate::error::{Error, Result};
use crate::link::compile;
use crate::lowering::Target;
use crate::passes::dump;
use crate::program::{BufferKind, Program};

/// Options for continuing sequences with caches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Generation {
    /// Number of sequences that are continued at the same time.
    pub batch: usize,
    /// Maximum number of tokens to which the newest token attends, including itself. The default is the length of a
    /// training sequence.
    pub window: Option<usize>,
    /// Number of prompt tokens that one run of `prefill` reads.
    pub chunk: usize,
}

impl Default for Generation {
    fn default() -> Self {
        Self { batch: 1, window: None, chunk: 128 }
    }
}

impl Generation {
    /// Returns the capacity of the cache in tokens per sequence, and the number of tokens that one run of `prefill`
    /// reads.
    pub fn window(&self, options: &StepOptions) -> (usize, usize) {
        let window = self.window.unwrap_or(options.sequence);
        (window, self.chunk.min(window))
    }

    /// Checks the extents.
    fn check(&self, options: &StepOptions) -> Result<()> {
        let (_, chunk) = self.window(options);
        if self.batch == 0 || chunk == 0 {
            let why = "batch, window or chunk is 0";
            return Err(Error::config("generation", why, "set each to at least 1"));
        }
        Ok(())
    }

    /// Returns the programs `prefill` and `decode`. Each outputs the logits of one token of each sequence, f32 [batch, 1,
    /// vocabulary].
    fn programs(
        &self,
        build: &Build<'_>,
        (options, ranks): (&StepOptions, &RankPlan),
        held: &Held,
        target: Target,
    ) -> Result<Vec<Program>> {
        let (window, chunk) = self.window(options);
        let program = |name, tokens| {
            let (mut trace, logits) = self.trace(build, options, ranks, (self.batch, tokens), window)?;
            let logits = if tokens == 1 { logits } else { one_of_each(&trace, &logits)? };
            let logits = logits.contiguous()?.to_dtype(DType::F32)?;
            forward(&mut trace, name, &[("logits", logits.id())], (options, ranks), held, target)
        };
        Ok(vec![program("prefill", chunk)?, program("decode", 1)?])
    }

    /// Returns the operation because of which the model cannot continue sequences with caches, or `None` if it can.
    fn obstacle(&self, build: &Build<'_>, options: &StepOptions, ranks: &RankPlan) -> Result<Option<Culprit>> {
        let (window, chunk) = self.window(options);
        // With one token at a time, an operation that combines tokens looks like any other.
        let (trace, logits) = self.trace(build, options, ranks, (1, chunk.max(2).min(window)), window)?;
        Ok(cache_obstacle(&trace.lock(), trace.tokens.id(), logits.id()))
    }

    /// Records the model's forward of sequences that are continued. Returns the logits of all tokens.
    fn trace(
        &self,
        build: &Build<'_>,
        options: &StepOptions,
        ranks: &RankPlan,
        extents: (usize, usize),
        window: usize,
    ) -> Result<(Trace, Tensor)> {
        let (trace, model) = Trace::new(build, options, ranks, extents, false)?;
        let positions = trace.input("positions", trace.tokens.spec().clone())?.id();
        trace.lock().set_sequences(Sequences::Continued { positions, window });
        let logits = model.forward(&trace.tokens, false)?;
        drop(model);
        Ok((trace, logits))
    }
}

/// Returns the logits of one token per sequence. The input `rows`, u32 [batch, 1], selects the tokens by their index
/// among all tokens of the batch. If the model ends in a linear layer, that layer computes only the selected rows.
fn one_of_each(trace: &Trace, logits: &Tensor) -> Result<Tensor> {
    let (batch, ..) = logits.dims3()?;
    let rows = trace.input("rows", Spec { shape: (batch, 1).into(), dtype: DType::U32 })?;
    let pick = |x: &Tensor| {
        let (batch, tokens, width) = x.dims3()?;
        x.reshape((batch * tokens, width))?.embedding(&rows)
    };
    let head = {
        let graph = trace.lock();
        let made = graph.producer(logits.id()).filter(|node| node.outputs[0] == logits.id());
        made.filter(|node| node.op.name() == "linear").cloned()
    };
    let Some(head) = head else { return Ok(pick(logits)?) };
    let inputs: Vec<Tensor> = head.inputs.iter().map(|&id| trace.tensor(id)).collect();
    let _layer = logits.enter(&head.layer);
    Ok(pick(&inputs[0])?.linear(&inputs[1], inputs.get(2))?)
}

/// Returns the programs that continue sequences with caches. Returns no programs if the options set no caches, or if the
/// model has an operation that combines tokens and has no cache. In the second case, also returns this operation.
///
/// # Errors
/// Returns the errors of recording the model. If the model cannot use caches, returns an error if the options set a
/// window that differs from the sequence length, which is the window of generation without caches.
pub(super) fn cached(
    build: &Build<'_>,
    (options, ranks): (&StepOptions, &RankPlan),
    held: &Held,
    target: Target,
    logits: &Logits,
) -> Result<(Vec<Program>, Option<Culprit>)> {
    let Some(generation) = options.caches() else { return Ok((Vec::new(), None)) };
    generation.check(options)?;
    let obstacle = match &logits.obstacle {
        Some(culprit) => Some(culprit.clone()),
        None => generation.obstacle(build, options, ranks)?,
    };
    let Some(culprit) = obstacle else {
        return Ok((generation.programs(build, (options, ranks), held, target)?, None));
    };
    if generation.window.is_some_and(|window| window != options.sequence) {
        let why = format!("{culprit} combines tokens and has no cache, so the window has step.sequence tokens");
        return Err(Error::config("generation.window", why, "leave it out, or set step.sequence to it"));
    }
    Ok((Vec::new(), Some(culprit)))
}

/// Compiles into one arena the programs of a model that is not trained. One of them is the evaluation. With caches,
/// `prefill` and `decode` are added. Without caches, or if the model cannot use them, the program that computes the
/// logits of one sequence is added instead.
///
/// # Errors
/// Returns the errors of [`compile_step`](super::compile_step).
pub fn compile_inference(
    build: &Build<'_>,
    options: &StepOptions,
    ranks: &RankPlan,
    target: Target,
) -> Result<(Executable, CompiledStep)> {
    let held = Held::default();
    let logits = Logits::record(build, options, ranks, &held, target)?;
    let mut programs = vec![evaluation(build, options, ranks, &held, target)?];
    let (generation, uncached) = cached(build, (options, ranks), &held, target, &logits)?;
    let Logits { program, vocabulary, causality, obstacle: _ } = logits;
    programs.extend(if generation.is_empty() { vec![program] } else { generation });
    programs.iter().for_each(|program| dump("compile", program));
    let executable = compile(&programs, &options.planning())?;
    // A parameter counts once, even if several programs read it.
    let mut parameters: HashMap<&str, u64> = HashMap::new();
    for buffer in programs.iter().flat_map(|program| &program.buffers) {
        if let BufferKind::Persistent { spec, .. } = &buffer.kind
            && buffer.label.role == Role::Parameter
        {
            parameters.insert(&buffer.label.tensor, spec.elements() as u64);
        }
    }
    let parameters = parameters.values().sum();
    let (layout, watched, model) = (CheckpointLayout::default(), Vec::new(), String::new());
    let program = None;
    Ok((executable, CompiledStep { parameters, vocabulary, layout, watched, model, causality, uncached, program }))
}
