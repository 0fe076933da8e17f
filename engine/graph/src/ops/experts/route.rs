//! Routing: sorts slots by expert (a counting sort) and drops those beyond an expert's capacity.

use candle_core::DType;
use gapless_kernels::Spec;
use gapless_kernels::cpu::Args;

use super::{NONE, expect_routed, is_routed};
use crate::op::Op;
use crate::reference::{Array, Reference};
use crate::rule::Rule;

/// The side that chooses: tokens choose experts, or experts choose tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Chooses {
    /// Tokens choose experts: input 0 is ids [.., tokens, k].
    Tokens,
    /// Experts choose tokens (Zhou et al., arXiv 2202.09368): input 0 is scores [.., tokens, experts], and every expert
    /// takes the tokens of each sequence for which it has the highest scores. A slot is then a pair of token and
    /// expert.
    Experts,
}

/// The rows that are dropped if an expert has more rows than its capacity.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum DropPolicy {
    /// Rows of the last tokens are dropped (Switch, arXiv 2101.03961).
    Last,
    /// Rows with the smallest weights are dropped. Of rows with equal weights, the last ones are dropped. In a causal
    /// model this leaks information about later tokens.
    Lightest,
}

/// Assigns a row to each slot, in the order of the experts.
///
/// Outputs, all u32:
/// - places [.., tokens, k]: the row of each slot, or [`NONE`];
/// - slots \[rows\]: the slot of each row, or [`NONE`];
/// - starts [experts × sequences + 1]: the offset of the first row of each run, and finally the end of the last run.
///   Rows are ordered by expert, sequence and token. The rows of expert e and sequence s begin at `starts[e × sequences
///   + s]`.
///
/// Without a capacity, there are as many rows as slots. With a capacity, each expert has at most that many rows per
/// sequence.
///
/// If tokens choose and the rows with the smallest weights are dropped, input 1 is the weights of the slots.
///
/// Two more inputs are optional. `routed`, f32 [.., tokens], is 0 for padding, which gets no row. If there is a
/// capacity, `routed` is followed by `limits`, u32 [tokens + 1]. Entry n of `limits` is the maximum number of rows that
/// an expert takes from a sequence with n tokens besides padding. No entry exceeds the capacity.
#[derive(Debug, Clone, Copy)]
pub struct Route {
    /// Number of experts.
    pub experts: usize,
    /// The side that chooses: tokens or experts.
    pub chooses: Chooses,
    /// The maximum number of rows that an expert takes from a sequence, and the rows that are dropped beyond it. `None`
    /// if there is no maximum.
    pub capacity: Option<(usize, DropPolicy)>,
}

impl Route {
    /// Returns (sequences, slots per sequence, choices per token).
    fn extents(dims: &[usize]) -> (usize, usize, usize) {
        let (batch, tokens, k) = super::by_sequence(dims).expect("checked by the shape rule");
        (batch, tokens * k, k)
    }

    /// Returns the maximum number of rows of slots of these extents.
    pub(crate) fn rows(&self, dims: &[usize]) -> usize {
        let (sequences, slots, _) = Self::extents(dims);
        let all = sequences * slots;
        self.capacity.map_or(all, |(most, _)| all.min(sequences.saturating_mul(self.experts).saturating_mul(most)))
    }

    /// The settings in the form that the CUDA kernels take.
    fn on_device(&self, operands: &gapless_kernels::cuda::Operands<'_>) -> gapless_kernels::cuda::launch::Routing {
        let dims = |index: usize| operands.inputs[index].layout.dims();
        let (sequences, ..) = Self::extents(dims(0));
        let (routed, limits) = self.routed_and_limits(operands.inputs.len(), |index| dims(index).len());
        gapless_kernels::cuda::launch::Routing {
            experts: self.experts,
            sequences,
            ids: (self.chooses == Chooses::Tokens).then_some(0),
            weights: self.weights(),
            routed,
            limits,
            kept: None,
            capacity: self.capacity.map(|(most, _)| most),
        }
    }

    fn weighs(&self) -> bool {
        matches!(self.capacity, Some((_, DropPolicy::Lightest)))
    }

    /// Returns the index of the input with the weights. Returns `None` if dropping does not depend on weights, because
    /// there is then no such input.
    fn weights(&self) -> Option<usize> {
        self.weighs().then_some(usize::from(self.chooses == Chooses::Tokens))
    }

    /// Returns the indices of the optional inputs `routed` and `limits`, or `None` for one that is missing. `rank`
    /// returns the rank of an input. The rank of `routed` is one less than that of input 0.
    fn routed_and_limits(&self, inputs: usize, rank: impl Fn(usize) -> usize) -> (Option<usize>, Option<usize>) {
        let routed = (1..inputs).find(|&index| rank(index) + 1 == rank(0));
        (routed, routed.filter(|_| self.capacity.is_some()).map(|routed| routed + 1))
    }

    /// Returns the maximum number of rows that an expert takes from sequence number `sequence`, which depends on the
    /// number of tokens that are not padding. Returns `None` if there is no capacity.
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

/// Sorts the slots that have a row by run: a counting sort. Writes the offset at which each run begins and finally the
/// end of the last run to `offsets`, and the slots to `sorted`.
fn sort(
    slots: usize,
    has_row: impl Fn(&usize) -> bool,
    run_of: impl Fn(usize) -> usize,
    offsets: &mut [u32],
    sorted: &mut [u32],
) {
    // `offsets` first holds the end of each run. Slots are placed from the last to the first, and each placed slot lowers
    // the offset of its run by one. In the end, `offsets` holds the beginnings of the runs.
    offsets.fill(0);
    (0..slots).filter(&has_row).for_each(|slot| offsets[run_of(slot)] += 1);
    let mut end = 0;
    for start in offsets.iter_mut() {
        end += *start;
        *start = end;
    }
    for slot in (0..slots).rev().filter(&has_row) {
        let start = &mut offsets[run_of(slot)];
        *start -= 1;
        sorted[*start as usize] = slot as u32;
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

    /// Scratch for the slots, ordered by expert, before any of them is dropped.
    fn workspace(&self, inputs: &[Spec], _: &[Spec], _: usize) -> Vec<u64> {
        vec![(inputs[0].elements() * size_of::<u32>()) as u64]
    }

    fn flops(&self, inputs: &[Spec], _: &[Spec]) -> u64 {
        inputs[0].elements() as u64
    }

    fn run(&self, args: &mut Args<'_>) {
        let (slot_rows, row_slots, row_offsets) = (args.output::<u32>(0), args.output::<u32>(1), args.output::<u32>(2));
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
        let has_row = |slot: &usize| is_routed(routed, slot / k);
        sort(slot_rows.len(), has_row, run_of, row_offsets, sorted);
        // Drops the slots beyond the capacity, and closes the gaps between the remaining rows.
        slot_rows.fill(NONE);
        let mut row = 0;
        for run in 0..row_offsets.len() - 1 {
            let (start, end) = (row_offsets[run] as usize, row_offsets[run + 1] as usize);
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
            row_offsets[run] = row as u32;
            for &slot in kept.iter() {
                slot_rows[slot as usize] = row as u32;
                row_slots[row] = slot;
                row += 1;
            }
        }
        *row_offsets.last_mut().expect("one more than there are runs") = row as u32;
        row_slots[row..].fill(NONE);
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
        let (mut row_slots, mut row_offsets) = (Vec::new(), Vec::new());
        for expert in 0..self.experts {
            for sequence in 0..sequences {
                row_offsets.push(row_slots.len() as f64);
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
                    places.data[slot] = row_slots.len() as f64;
                    row_slots.push(slot as f64);
                }
            }
        }
        row_offsets.push(row_slots.len() as f64);
        row_slots.resize(self.rows(&input.dims), none);
        vec![places, Array::new(&[row_slots.len()], row_slots), Array::new(&[row_offsets.len()], row_offsets)]
    }
}

/// Assigns a row to each slot that has one in another routing, in the order of the experts: a rank routes its own tokens,
/// of which a routing of all tokens has decided which exceed a capacity.
///
/// Input 0 is places [.., tokens, k], which is [`NONE`] for slots without a row. If tokens choose, input 1 is ids [..,
/// tokens, k]. The outputs are those of [`Route`].
#[derive(Debug, Clone, Copy)]
pub struct RouteKept {
    /// Number of experts.
    pub experts: usize,
    /// The side that chooses: tokens or experts.
    pub chooses: Chooses,
    /// The maximum number of rows.
    pub rows: usize,
}

impl Op for RouteKept {
    fn name(&self) -> &'static str {
        "route_kept"
    }

    fn rule(&self, inputs: &[Spec], _: &[Spec]) -> Option<Rule> {
        let slots = &"ABCDEFGHIJ"[..inputs[0].dims().len()];
        Some(Rule::Labels(format!("{} -> {slots}, R, S", vec![slots; inputs.len()].join(", ")).into()))
    }

    fn infer(&self, inputs: &[Spec]) -> Result<Vec<Spec>, String> {
        crate::ops::expect_ids("places", &inputs[0])?;
        let (sequences, ..) = super::by_sequence(inputs[0].dims())?;
        if self.chooses == Chooses::Tokens && inputs.get(1) != Some(&inputs[0]) {
            return Err("the ids must have the shape of the places".into());
        }
        let u32s = |elements: usize| Spec { shape: elements.into(), dtype: DType::U32 };
        Ok(vec![inputs[0].clone(), u32s(self.rows), u32s(self.experts * sequences + 1)])
    }

    fn gradient(&self, _: &mut crate::Gradient) -> crate::error::Result<()> {
        Ok(())
    }

    fn flops(&self, inputs: &[Spec], _: &[Spec]) -> u64 {
        inputs[0].elements() as u64
    }

    fn run(&self, args: &mut Args<'_>) {
        let (slot_rows, row_slots, row_offsets) = (args.output::<u32>(0), args.output::<u32>(1), args.output::<u32>(2));
        let (sequences, length, _) = Route::extents(args.input_dims(0));
        let places = args.input::<u32>(0);
        let ids = (self.chooses == Chooses::Tokens).then(|| args.input::<u32>(1));
        let expert = |slot: usize| ids.map_or(slot % self.experts, |ids| ids[slot] as usize);
        let run_of = |slot: usize| expert(slot) * sequences + slot / length;
        sort(places.len(), |&slot| places[slot] != NONE, run_of, row_offsets, row_slots);
        let used = super::used_rows(row_offsets);
        row_slots[used..].fill(NONE);
        slot_rows.fill(NONE);
        for (row, &slot) in row_slots[..used].iter().enumerate() {
            slot_rows[slot as usize] = row as u32;
        }
    }
    fn cuda(&self, operands: &gapless_kernels::cuda::Operands<'_>) -> Option<Vec<gapless_kernels::cuda::Launch>> {
        let routing = gapless_kernels::cuda::launch::Routing {
            experts: self.experts,
            sequences: Route::extents(operands.inputs[0].dims()).0,
            ids: (self.chooses == Chooses::Tokens).then_some(1),
            weights: None,
            routed: None,
            limits: None,
            kept: Some(0),
            capacity: None,
        };
        gapless_kernels::cuda::launch::route(routing, operands)
    }

    fn reference(&self, args: &Reference<'_>) -> Vec<Array> {
        let places = args.input(0);
        let (sequences, length, _) = Route::extents(&places.dims);
        let none = f64::from(NONE);
        let expert = |slot: usize| match self.chooses {
            Chooses::Tokens => args.input(1).data[slot] as usize,
            Chooses::Experts => slot % self.experts,
        };
        let mut slot_rows = Array { dims: places.dims.clone(), data: vec![none; places.data.len()] };
        let (mut row_slots, mut row_offsets) = (Vec::new(), Vec::new());
        for of_expert in 0..self.experts {
            for sequence in 0..sequences {
                row_offsets.push(row_slots.len() as f64);
                for slot in sequence * length..(sequence + 1) * length {
                    if places.data[slot] != none && expert(slot) == of_expert {
                        slot_rows.data[slot] = row_slots.len() as f64;
                        row_slots.push(slot as f64);
                    }
                }
            }
        }
        row_offsets.push(row_slots.len() as f64);
        row_slots.resize(self.rows, none);
        vec![slot_rows, Array::new(&[row_slots.len()], row_slots), Array::new(&[row_offsets.len()], row_offsets)]
    }
}
