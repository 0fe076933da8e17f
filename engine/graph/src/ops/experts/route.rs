//! Slots in the order in which experts work: a counting sort, with what does not fit left out.

use candle_core::DType;
use gapless_kernels::Spec;
use gapless_kernels::cpu::Args;

use super::{NONE, expect_routed, is_routed};
use crate::op::Op;
use crate::reference::{Array, Reference};

/// Who chooses whom.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Chooses {
    /// Tokens choose experts: input 0 is ids [.., tokens, k].
    Tokens,
    /// Experts choose tokens (Zhou et al., arXiv 2202.09368): input 0 is scores [.., tokens, experts], every expert takes
    /// the tokens of each sequence that score highest, and a slot is a pair of token and expert.
    Experts,
}

/// Which of too many slots of an expert are left out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum DropPolicy {
    /// Rows of the last tokens are dropped (Switch, arXiv 2101.03961).
    Last,
    /// Rows with the smallest weights are dropped; among equal weights, the last. In a causal model this leaks
    /// information about later tokens.
    Lightest,
}

/// Rows for the slots of each expert: (places [.., tokens, k], slots \[rows\], starts [experts × sequences + 1]), all u32.
/// `places` says which row a slot has, `slots` the reverse, [`NONE`] where there is none. Rows are in the order of expert,
/// sequence, token; those of expert e and sequence s begin at `starts[e × sequences + s]`.
///
/// Without a capacity there are as many rows as slots; with one, at most that many for each expert and sequence.
///
/// A further input, f32 [.., tokens], is 0 for padding, which has no row. With a capacity, one more says the most rows that an expert takes
/// of a sequence by the number of its other tokens: u32 [tokens + 1], none above the capacity.
#[derive(Debug, Clone, Copy)]
pub struct Route {
    /// Number of experts.
    pub experts: usize,
    /// Who chooses.
    pub chooses: Chooses,
    /// Most rows that an expert takes of a sequence, and what is left out beyond.
    pub capacity: Option<(usize, DropPolicy)>,
}

impl Route {
    /// (sequences, slots of a sequence, choices of a token).
    fn extents(dims: &[usize]) -> (usize, usize, usize) {
        let (batch, tokens, k) = super::by_sequence(dims).expect("checked by the shape rule");
        (batch, tokens * k, k)
    }

    fn rows(&self, dims: &[usize]) -> usize {
        let (sequences, slots, _) = Self::extents(dims);
        let all = sequences * slots;
        self.capacity.map_or(all, |(most, _)| all.min(sequences.saturating_mul(self.experts).saturating_mul(most)))
    }

    /// As kernels for GPUs have it.
    fn on_device(&self, operands: &gapless_kernels::cuda::Operands<'_>) -> gapless_kernels::cuda::launch::Routing {
        let dims = |index: usize| operands.inputs[index].layout.dims();
        let (sequences, ..) = Self::extents(dims(0));
        let (routed, limits) = self.routed_and_limits(operands.inputs.len(), |index| dims(index).len());
        gapless_kernels::cuda::launch::Routing {
            experts: self.experts,
            sequences,
            has_ids: self.chooses == Chooses::Tokens,
            weights: self.weights(),
            routed,
            limits,
            capacity: self.capacity.map(|(most, _)| most),
        }
    }

    fn weighs(&self) -> bool {
        matches!(self.capacity, Some((_, DropPolicy::Lightest)))
    }

    /// The index of the weights, if the lightest are left out.
    fn weights(&self) -> Option<usize> {
        self.weighs().then_some(usize::from(self.chooses == Chooses::Tokens))
    }

    /// The indices of what each token counts and, with a capacity, of the limits: behind the weights, by their rank.
    fn routed_and_limits(&self, inputs: usize, rank: impl Fn(usize) -> usize) -> (Option<usize>, Option<usize>) {
        let routed = (1..inputs).find(|&index| rank(index) + 1 == rank(0));
        (routed, routed.filter(|_| self.capacity.is_some()).map(|routed| routed + 1))
    }

    /// The most rows of each run: those of its sequence's tokens.
    fn most<T: PartialOrd + Default>(
        &self,
        sequence: usize,
        tokens: usize,
        routed: Option<&[T]>,
        limit: impl Fn(usize) -> Option<usize>,
    ) -> Option<usize> {
        let (most, _) = self.capacity?;
        let count = (sequence * tokens..(sequence + 1) * tokens).filter(|&token| is_routed(routed, token)).count();
        Some(limit(count).unwrap_or(most))
    }
}

impl Op for Route {
    fn name(&self) -> &'static str {
        "route"
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        let (sequences, _, last) = super::by_sequence(inputs[0].dims())?;
        match self.chooses {
            Chooses::Tokens => crate::ops::expect_ids("ids", &inputs[0])?,
            Chooses::Experts => {
                crate::ops::expect_float(&inputs[..1])?;
                if last != self.experts || !self.weighs() {
                    return Err(format!("expert choice needs a score for each of {} experts", self.experts));
                }
            }
        }
        if self.chooses == Chooses::Tokens
            && self.weighs()
            && inputs.get(1).is_none_or(|weights| weights.dims() != inputs[0].dims())
        {
            return Err("the weights must have the shape of the ids".into());
        }
        if matches!(self.capacity, Some((0, _))) {
            return Err("the capacity must be at least 1 row".into());
        }
        let (routed, limits) = self.routed_and_limits(inputs.len(), |index| inputs[index].dims().len());
        if let Some(routed) = routed {
            expect_routed(&inputs[routed], &inputs[0])?;
        }
        if let Some(limits) = limits {
            let tokens = super::by_sequence(inputs[0].dims())?.1;
            if inputs.get(limits) != Some(&Spec { shape: (tokens + 1).into(), dtype: DType::U32 }) {
                return Err(format!("the limits must be u32 [{}]", tokens + 1));
            }
        }
        let slots = inputs[0].elements();
        if slots >= NONE as usize {
            return Err(format!("{slots} choices are more than u32 can count"));
        }
        let u32s = |shape: candle_core::Shape| Spec { shape, dtype: DType::U32 };
        let places = u32s(inputs[0].shape.clone());
        Ok(vec![places, u32s(self.rows(inputs[0].dims()).into()), u32s((self.experts * sequences + 1).into())])
    }

    fn gradient(&self, _: &mut crate::Gradient) -> crate::error::Result<()> {
        Ok(())
    }

    /// The slots by expert, before any is left out.
    fn workspace(&self, inputs: &[Spec], _: &[Spec], _: usize) -> Vec<u64> {
        vec![(inputs[0].elements() * size_of::<u32>()) as u64]
    }

    fn flops(&self, inputs: &[Spec], _: &[Spec]) -> u64 {
        inputs[0].elements() as u64
    }

    fn run(&self, args: &mut Args<'_>) {
        let (places, slots, starts) = (args.output::<u32>(0), args.output::<u32>(1), args.output::<u32>(2));
        let sorted = args.workspace().take::<u32>();
        let dims = args.input_dims(0);
        let (sequences, length, k) = Self::extents(dims);
        let (routed, limits) = self.routed_and_limits(args.inputs(), |index| args.input_dims(index).len());
        let (routed, limits) = (routed.map(|i| args.input::<f32>(i)), limits.map(|i| args.input::<u32>(i)));
        let ids = (self.chooses == Chooses::Tokens).then(|| args.input::<u32>(0));
        let weights = self.weights().map(|index| args.input::<f32>(index));
        let experts = self.experts;
        let run_of = |slot: usize| {
            let expert = ids.map_or(slot % experts, |ids| ids[slot] as usize);
            expert * sequences + slot / length
        };
        // A counting sort: `starts` are ends while the slots are put in place, from the last one on.
        starts.fill(0);
        let has_row = |slot: &usize| is_routed(routed, slot / k);
        (0..places.len()).filter(has_row).for_each(|slot| starts[run_of(slot)] += 1);
        let mut end = 0;
        for start in starts.iter_mut() {
            end += *start;
            *start = end;
        }
        for slot in (0..places.len()).rev().filter(has_row) {
            let start = &mut starts[run_of(slot)];
            *start -= 1;
            sorted[*start as usize] = slot as u32;
        }
        // The rows of each run, closed up.
        places.fill(NONE);
        let mut row = 0;
        for run in 0..starts.len() - 1 {
            let (start, end) = (starts[run] as usize, starts[run + 1] as usize);
            let mut kept = &mut sorted[start..end];
            let limit = |count: usize| limits.map(|limits| limits[count] as usize);
            if let Some(most) = self.most(run % sequences, length / k, routed, limit)
                && kept.len() > most
            {
                if let Some(weights) = weights {
                    kept.select_nth_unstable_by(most - 1, |&a, &b| {
                        weights[b as usize].total_cmp(&weights[a as usize]).then(a.cmp(&b))
                    });
                }
                kept = &mut kept[..most];
                kept.sort_unstable();
            }
            starts[run] = row as u32;
            for &slot in kept.iter() {
                places[slot as usize] = row as u32;
                slots[row] = slot;
                row += 1;
            }
        }
        *starts.last_mut().expect("one more than there are runs") = row as u32;
        slots[row..].fill(NONE);
    }
    fn cuda_workspace(&self, inputs: &[Spec], outputs: &[Spec]) -> Vec<u64> {
        self.workspace(inputs, outputs, 1)
    }
    fn cuda(&self, operands: &gapless_kernels::cuda::Operands<'_>) -> Option<Vec<gapless_kernels::cuda::Launch>> {
        gapless_kernels::cuda::launch::route(self.on_device(operands), operands)
    }

    fn reference(&self, args: &Reference<'_>) -> Vec<Array> {
        let input = args.input(0);
        let (sequences, length, k) = Self::extents(&input.dims);
        let (routed, limits) = self.routed_and_limits(args.inputs(), |index| args.input(index).dims.len());
        let (routed, limits) = (routed.map(|i| &*args.input(i).data), limits.map(|i| &*args.input(i).data));
        let none = f64::from(NONE);
        let mut places = Array { dims: input.dims.clone(), data: vec![none; input.data.len()] };
        let (mut slots, mut starts) = (Vec::new(), Vec::new());
        for expert in 0..self.experts {
            for sequence in 0..sequences {
                starts.push(slots.len() as f64);
                let chosen = |slot: usize| match self.chooses {
                    Chooses::Tokens => input.data[slot] as usize == expert,
                    Chooses::Experts => slot % self.experts == expert,
                };
                let has_row = |&slot: &usize| is_routed(routed, slot / k) && chosen(slot);
                let mut run: Vec<usize> = (sequence * length..(sequence + 1) * length).filter(has_row).collect();
                let limit = |count: usize| limits.map(|limits| limits[count] as usize);
                if let Some(most) = self.most(sequence, length / k, routed, limit) {
                    if let Some(weights) = self.weights() {
                        let weights = &args.input(weights).data;
                        run.sort_by(|&a, &b| weights[b].total_cmp(&weights[a]));
                    }
                    run.truncate(most);
                    run.sort_unstable();
                }
                for slot in run {
                    places.data[slot] = slots.len() as f64;
                    slots.push(slot as f64);
                }
            }
        }
        starts.push(slots.len() as f64);
        slots.resize(self.rows(&input.dims), none);
        vec![places, Array::new(&[slots.len()], slots), Array::new(&[starts.len()], starts)]
    }
}
