//! Fuses elementwise GPU operations and some of their neighbours, so that intermediate values stay in registers.
//!
//! In: a program in its final order. Out: the same program with fewer instructions, and possibly fewer buffers. An
//! operation is fused into a later one that reads its result. The group runs at the position of its last member.
//!
//! - A result that only the group reads stays in registers. The buffer of such a result is removed, unless a member
//!   overwrites that buffer in place. Other results are also stored.
//! - A group may end with a normalization of rows.
//! - A group may begin with the input gradient of a normalization. The group then includes the gradients of the
//!   normalization's weight and bias, because these gradients read the same rows.
//! - A matrix product takes one operation as its epilogue.
//! - An embedding gradient that is one summand of a sum is accumulated directly into the other summand.
//! - The peak of live bytes never rises.
//!
//! Never: fuses across a message or collective, or across actions. The only exception is that an embedding gradient may
//! move into a sum in the update. Never fuses operations with dynamic rows, or recomputed operations with others,
//! because reports count recomputed operations separately.

mod fused;
mod product;
#[cfg(test)]
mod reference;

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

use candle_core::DType;
use gapless_graph::Spec;
use gapless_kernels::cuda::Fusible;
use gapless_kernels::cuda::generate::Source;
use gapless_kernels::cuda::launch::{can_walk, fits_one_pass};

use self::fused::{Fused, Member};
use super::Context;
use crate::error::Result;
use crate::passes::reorder::Profile;
use crate::program::{BufferId, BufferKind, Instr, InstrKind, Operand, Program};

/// Maximum distance between the first and the last member of a group, in instructions.
const REACH: usize = 64;

/// Maximum number of members of a group. Larger kernels run out of registers, which costs more than saved launches
/// gain.
const MAX_MEMBERS: usize = 24;
/// Maximum number of operands of the fused instruction. Kernels with more operands would also run out of registers.
const MAX_OPERANDS: usize = 16;

/// Maximum number of inputs of an expression, and of its constants. Each input and constant is named by a single digit.
const MAX_NAMED: usize = 10;

pub(super) fn run(program: &mut Program, _: &Context<'_>) -> Result<()> {
    fuse(program);
    Ok(())
}

/// Fuses all groups that it finds.
fn fuse(program: &mut Program) {
    let mut fusion = Fusion::new(program);
    let mut merged: Vec<(usize, Instr)> = Vec::new();
    for last in (0..program.instrs.len()).rev() {
        let group = fusion.grow(last);
        if group.len() > 1 {
            let together = fusion.merge(&group).expect("it could be merged when it grew");
            merged.push((last, together));
        }
    }
    let is_kept: Vec<bool> = fusion.is_taken.iter().map(|is_taken| !is_taken).collect();
    for (at, instr) in merged {
        program.instrs[at] = instr;
    }
    program.keep(&is_kept);
}

/// The contents of a buffer from one write to the next.
#[derive(Debug, Default)]
struct Version {
    /// The instruction and output that write the version. `None` for contents that exist before the program starts.
    written_by: Option<(usize, usize)>,
    /// Instructions that read the version. Instructions that write a part of the buffer and preserve the rest are
    /// included.
    readers: Vec<usize>,
    /// Whether the version is read after the program ends, by the host or the next program.
    is_read_after: bool,
}

/// A program, with the data that fusion decisions need.
struct Fusion<'a> {
    program: &'a Program,
    profile: Profile,
    /// The peak of live bytes before fusion.
    most: u64,
    versions: Vec<Version>,
    /// By instruction and input: the version that is read.
    read: Vec<Vec<usize>>,
    /// By instruction and output: the version that is written.
    written: Vec<Vec<usize>>,
    /// By buffer: the instructions that touch it.
    users: Vec<Vec<usize>>,
    /// By instruction: how the instruction can be fused. `None` if it cannot.
    fusible: Vec<Option<Fusible>>,
    /// By instruction: the range of instructions with which it may be fused.
    within: Vec<Range<usize>>,
    /// Instructions that were fused into a later one.
    is_taken: Vec<bool>,
}

impl<'a> Fusion<'a> {
    fn new(program: &'a Program) -> Self {
        let profile = Profile::new(program);
        let most = profile.live.iter().copied().max().unwrap_or(0);
        let mut within = vec![0..0; program.instrs.len()];
        for segment in &profile.segments {
            for at in segment.clone() {
                within[at] = segment.clone();
            }
        }
        for part in &program.parts {
            for at in part.instrs.clone() {
                within[at] = within[at].start.max(part.instrs.start)..within[at].end.min(part.instrs.end);
            }
        }
        let fusible = program.instrs.iter().map(|instr| fusible(program, instr)).collect();
        let (mut versions, mut read, mut written) = (Vec::new(), Vec::new(), Vec::new());
        let mut now: Vec<usize> = (0..program.buffers.len()).collect();
        versions.resize_with(program.buffers.len(), Version::default);
        for (at, instr) in program.instrs.iter().enumerate() {
            let of_inputs: Vec<usize> = instr.inputs.iter().map(|input| now[input.buffer.index()]).collect();
            of_inputs.iter().for_each(|&version| versions[version].readers.push(at));
            read.push(of_inputs);
            let mut of_outputs = Vec::new();
            for (index, output) in instr.outputs.iter().enumerate() {
                let buffer = output.buffer.index();
                if !is_whole(program, output) || instr.accumulate >> index & 1 == 1 {
                    versions[now[buffer]].readers.push(at);
                }
                now[buffer] = versions.len();
                of_outputs.push(versions.len());
                versions.push(Version { written_by: Some((at, index)), ..Version::default() });
            }
            written.push(of_outputs);
        }
        for (buffer, &version) in program.buffers.iter().zip(&now) {
            versions[version].is_read_after = !matches!(buffer.kind, BufferKind::Temporary);
        }
        let mut users = vec![Vec::new(); program.buffers.len()];
        for (at, instr) in program.instrs.iter().enumerate() {
            let operands = instr.inputs.iter().chain(&instr.outputs).map(|operand| operand.buffer);
            operands.chain(instr.workspace.iter().copied()).for_each(|buffer| users[buffer.index()].push(at));
        }
        let is_taken = vec![false; program.instrs.len()];
        Self { program, profile, most, versions, read, written, users, fusible, within, is_taken }
    }

    /// Collects all earlier instructions that can be fused with `last`, and marks them as taken.
    fn grow(&mut self, last: usize) -> BTreeSet<usize> {
        let mut group = BTreeSet::from([last]);
        let begins = !self.is_taken[last]
            && matches!(
                self.fusible[last],
                Some(Fusible::Each { .. } | Fusible::Norm { .. } | Fusible::NormGradInput { .. })
            );
        // Each new member can make further members possible.
        while begins && group.len() < MAX_MEMBERS {
            let makers =
                group.iter().flat_map(|&member| &self.read[member]).filter_map(|&v| self.versions[v].written_by);
            let makers = makers.map(|(maker, _)| maker);
            let candidates: BTreeSet<usize> = makers.chain(self.weight_sums(&group)).collect();
            let found = candidates.into_iter().rev().find(|maker| !group.contains(maker) && self.joins(&group, *maker));
            let Some(maker) = found else { break };
            self.take(&mut group, maker);
        }
        group
    }

    /// True if the instruction `maker` can be fused with a group of later instructions.
    fn joins(&self, group: &BTreeSet<usize>, maker: usize) -> bool {
        let last = *group.last().expect("a group has members");
        let (of_maker, of_last) = (&self.program.instrs[maker], &self.program.instrs[last]);
        let Some(fusible) = &self.fusible[maker] else { return false };
        let reaches = || self.within[last].contains(&maker) || self.adds_in_update(maker, last);
        let is_near = last - maker <= REACH && reaches();
        let is_alike = of_maker.micro_batch == of_last.micro_batch && of_maker.rematerialized == of_last.rematerialized;
        let has_head =
            || group.iter().any(|&member| matches!(self.fusible[member], Some(Fusible::NormGradInput { .. })));
        let is_norm = matches!(self.fusible[last], Some(Fusible::Norm { .. }));
        // A product or an embedding gradient can only be fused with one operation that follows.
        let stands_alone = |fusible: &Fusible| matches!(fusible, Fusible::Product | Fusible::EmbeddingGrad { .. });
        let is_closed = || group.iter().any(|&member| self.fusible[member].as_ref().is_some_and(stands_alone));
        let may_begin = match fusible {
            Fusible::Each { .. } => !(is_closed() || is_norm && self.prefers_product(maker)),
            Fusible::Product => group.len() == 1 && self.fits_epilogue(maker, last),
            Fusible::NormGradInput { .. } => !is_norm && !has_head() && !is_closed(),
            Fusible::NormGradWeight => self.weight_sums(group).any(|beside| beside == maker),
            Fusible::EmbeddingGrad { .. } => group.len() == 1 && self.adds_in_place(maker, last),
            Fusible::Norm { .. } => false,
        };
        if !is_near || !is_alike || !may_begin || self.is_taken[maker] {
            return false;
        }
        let mut with = group.clone();
        with.insert(maker);
        let are_read_in_place = group.iter().all(|&reader| self.reads_in_place(maker, reader));
        are_read_in_place && self.may_move(group, maker, last) && self.merge(&with).is_some() && {
            let rise = self.live_change(&with, maker, last);
            let between = (maker + 1..=last).filter(|at| !self.is_taken[*at] && (!group.contains(at) || *at == last));
            between.into_iter().all(|at| {
                let [more, less] = rise(at);
                self.profile.live[at] + more <= self.most + less
            })
        }
    }

    /// If the group begins with the input gradient of a normalization, returns the instructions that sum up the
    /// gradients of that normalization's weight and bias. Only instructions are returned that precede the group's last
    /// member and read the same rows.
    fn weight_sums(&self, group: &BTreeSet<usize>) -> impl Iterator<Item = usize> {
        let last = group.last().copied().unwrap_or(0);
        let has_sums = group.iter().any(|&member| self.fusible[member] == Some(Fusible::NormGradWeight));
        let head = group.iter().find(|&&member| matches!(self.fusible[member], Some(Fusible::NormGradInput { .. })));
        let rows = head.filter(|_| !has_sums).and_then(|&head| match self.read[head][..] {
            [x, _, stats, dy] => Some([x, stats, dy]),
            _ => None,
        });
        let readers = rows.map_or(&[][..], |[.., dy]| &self.versions[dy].readers);
        let is_beside = move |at: &usize| {
            let is_of_rows = rows.is_some_and(|rows| self.read[*at] == rows);
            *at < last && is_of_rows && self.fusible[*at] == Some(Fusible::NormGradWeight)
        };
        readers.iter().copied().filter(is_beside)
    }

    /// True if `reader` reads each result of `maker` element by element, at the index at which `maker` writes it.
    fn reads_in_place(&self, maker: usize, reader: usize) -> bool {
        let steps = &self.program.instrs;
        self.read[reader].iter().enumerate().all(|(index, version)| {
            let Some(output) = self.written[maker].iter().position(|made| made == version) else { return true };
            let (to, from) = (&steps[reader].inputs[index], &steps[maker].outputs[output]);
            let same = is_whole(self.program, to) && to.dtype == from.dtype && count(to) == count(from);
            same && match self.fusible[reader] {
                Some(Fusible::Each { .. }) => true,
                Some(Fusible::Norm { .. }) => index == 0,
                _ => false,
            }
        })
    }

    /// True if a version has readers only in the group and is not read after the program.
    fn is_private(&self, group: &BTreeSet<usize>, version: usize) -> bool {
        let Version { readers, is_read_after, .. } = &self.versions[version];
        !is_read_after && !readers.is_empty() && readers.iter().all(|reader| group.contains(reader))
    }

    /// True if the instruction `maker` can run at the position of the group's last member. Instructions in between that
    /// are not members must not write the inputs of `maker` or touch its outputs.
    fn may_move(&self, group: &BTreeSet<usize>, maker: usize, last: usize) -> bool {
        let instr = &self.program.instrs[maker];
        let others = (maker + 1..last).filter(|at| !group.contains(at) && !self.is_taken[*at]);
        others.map(|at| &self.program.instrs[at]).all(|other| {
            let writes = |buffer: BufferId| {
                other.outputs.iter().any(|o| o.buffer == buffer) || other.workspace.contains(&buffer)
            };
            let touches = |buffer: BufferId| writes(buffer) || other.inputs.iter().any(|i| i.buffer == buffer);
            !instr.inputs.iter().any(|i| writes(i.buffer)) && !instr.outputs.iter().any(|o| touches(o.buffer))
        })
    }

    /// Returns a function from a position to two numbers: the bytes that become live at the position if `maker` joins
    /// the group, and the bytes that stop being live at the position.
    fn live_change(&self, with: &BTreeSet<usize>, maker: usize, last: usize) -> impl Fn(usize) -> [u64; 2] + use<'_> {
        let held = |buffer: &BufferId| {
            let buffer = buffer.index();
            (self.profile.bytes[buffer], self.profile.born[buffer], self.profile.dies[buffer])
        };
        let instr = &self.program.instrs[maker];
        let longer: BTreeSet<BufferId> = instr.inputs.iter().map(|input| input.buffer).collect();
        let longer = longer.iter().filter_map(|buffer| match held(buffer) {
            (bytes, _, Some(dies)) if dies < last => Some((bytes, dies + 1..last + 1)),
            _ => None,
        });
        let scratch: u64 = instr.workspace.iter().map(|piece| self.profile.bytes[piece.index()]).sum();
        // An output that was dead before the last member runs is now live only at the last member.
        let unread = instr.outputs.iter().filter(|output| !self.vanishes(with, output.buffer));
        let unread = unread.filter_map(|output| match held(&output.buffer) {
            (bytes, _, Some(dies)) if dies < last => Some((bytes, last..last + 1)),
            _ => None,
        });
        let longer: Vec<(u64, Range<usize>)> = longer.chain(unread).chain([(scratch, last..last + 1)]).collect();
        let gone =
            instr.outputs.iter().filter(|output| self.vanishes(with, output.buffer)).map(|output| &output.buffer);
        let gone: Vec<(u64, Range<usize>)> = gone
            .filter_map(|buffer| match held(buffer) {
                (bytes, Some(born), Some(dies)) => Some((bytes, born..dies + 1)),
                _ => None,
            })
            .collect();
        move |at| [&longer, &gone].map(|all| all.iter().filter(|(_, at_all)| at_all.contains(&at)).map(|b| b.0).sum())
    }

    /// True if the group keeps all contents of a buffer in registers, so that the buffer is not needed.
    fn vanishes(&self, group: &BTreeSet<usize>, buffer: BufferId) -> bool {
        self.users[buffer.index()].iter().all(|user| {
            let instr = &self.program.instrs[*user];
            let is_inner =
                |version: &usize| self.versions[*version].written_by.is_some() && self.is_private(group, *version);
            let inputs = instr.inputs.iter().zip(&self.read[*user]);
            let mut touches = inputs.chain(instr.outputs.iter().zip(&self.written[*user]));
            let is_normalised = matches!(self.fusible[*user], Some(Fusible::Norm { .. }));
            group.contains(user)
                && touches.all(|(operand, version)| operand.buffer != buffer || is_inner(version) && !is_normalised)
        })
    }

    /// Adds the instruction `maker` to a group.
    fn take(&mut self, group: &mut BTreeSet<usize>, maker: usize) {
        let last = *group.last().expect("a group has members");
        group.insert(maker);
        let changes: Vec<(usize, [u64; 2])> = {
            let rise = self.live_change(group, maker, last);
            (maker..=last).map(|at| (at, rise(at))).collect()
        };
        for (at, [more, less]) in changes {
            self.profile.live[at] = (self.profile.live[at] + more).saturating_sub(less);
        }
        for input in &self.program.instrs[maker].inputs {
            let dies = &mut self.profile.dies[input.buffer.index()];
            *dies = dies.map(|dies| dies.max(last));
        }
        self.is_taken[maker] = true;
    }

    /// Returns the fused instruction of a group, or `None` if the members do not fit into one kernel.
    fn merge(&self, group: &BTreeSet<usize>) -> Option<Instr> {
        let order: Vec<usize> = group.iter().copied().collect();
        let member_of = |version: usize| {
            let (maker, output) = self.versions[version].written_by?;
            order.binary_search(&maker).ok().map(|member| (member, output))
        };
        let mut inputs: Vec<Operand> = Vec::new();
        let mut members = Vec::new();
        for &at in &order {
            let instr = &self.program.instrs[at];
            let InstrKind::Compute(op) = &instr.kind else { return None };
            let sources = instr.inputs.iter().zip(&self.read[at]).map(|(input, &version)| {
                let source = match member_of(version) {
                    Some((member, output)) => Source::Member(member, output),
                    None => {
                        let known = inputs.iter().position(|known| is_same(known, input));
                        Source::Memory(known.unwrap_or_else(|| {
                            inputs.push(Operand { overwritten_by: None, ..input.clone() });
                            inputs.len() - 1
                        }))
                    }
                };
                (source, input.layout.dims().to_vec())
            });
            let sources: Vec<(Source, Vec<usize>)> = sources.collect();
            // The kernel that computes these sums takes its extents from operands in memory.
            let is_found = |(source, dims): &(Source, Vec<usize>)| match *source {
                Source::Memory(index) => inputs[index].layout.dims() == dims,
                Source::Member(..) => false,
            };
            if self.fusible[at] == Some(Fusible::NormGradWeight) && !sources.iter().all(is_found) {
                return None;
            }
            members.push(Member { op: op.clone(), inputs: sources });
        }
        let last_at = order.last()?;
        let last = &self.program.instrs[*last_at];
        let is_norm = matches!(self.fusible[*last_at], Some(Fusible::Norm { .. }));
        let normalised = is_norm.then(|| self.read[order[order.len() - 1]][0]);
        let (mut outputs, mut made, mut accumulate) = (Vec::new(), Vec::new(), 0);
        for (member, &at) in order.iter().enumerate() {
            for (index, (output, &version)) in self.program.instrs[at].outputs.iter().zip(&self.written[at]).enumerate()
            {
                if normalised == Some(version) || !self.is_private(group, version) {
                    accumulate |= (self.program.instrs[at].accumulate >> index & 1) << outputs.len();
                    outputs.push(output.clone());
                    made.push((member, index));
                }
            }
        }
        let overwrites = self.overwrites(&order, &mut inputs, &outputs)?;
        if inputs.len() + outputs.len() > MAX_OPERANDS {
            return None;
        }
        let specs = outputs.iter().map(spec).collect();
        let flops = order.iter().map(|&at| self.program.instrs[at].flops()).fold(0, u64::saturating_add);
        let pieces: Vec<BufferId> = order.iter().flat_map(|&at| &self.program.instrs[at].workspace).copied().collect();
        let workspace = pieces.iter().map(|piece| self.program.buffers[piece.index()].bytes).collect();
        let work = InstrKind::Compute(Arc::new(Fused { members, outputs: made, specs, overwrites, workspace, flops }));
        // A sum that follows a product may belong to no layer, so the instruction gets the product's layer.
        let named = if self.fusible[order[0]] == Some(Fusible::Product) { order[0] } else { *last_at };
        let layer = self.program.instrs[named].layer.clone();
        let instr = Instr::plain(work, inputs, outputs, last.micro_batch, layer);
        Some(Instr { workspace: pieces, accumulate, rematerialized: last.rematerialized, ..instr })
    }

    /// Marks the inputs that outputs overwrite in place, and returns the pairs (input, output). Returns `None` if one
    /// kernel cannot overwrite them correctly.
    fn overwrites(&self, order: &[usize], inputs: &mut [Operand], outputs: &[Operand]) -> Option<Vec<(usize, usize)>> {
        let mut overwrites = Vec::new();
        for (index, output) in outputs.iter().enumerate() {
            // The order of accesses matters if a buffer is written twice, or if the elements that are read differ from
            // those that are written. A kernel does not order its accesses.
            let is_twice = outputs[..index].iter().any(|other| other.buffer == output.buffer);
            let mut over = (0..inputs.len()).filter(|&input| inputs[input].buffer == output.buffer);
            let first = over.next();
            if is_twice || over.next().is_some() {
                return None;
            }
            if let Some(input) = first {
                let fits = is_whole(self.program, &inputs[input]) && inputs[input].dtype == output.dtype;
                if !fits || count(&inputs[input]) != count(output) || !self.may_overwrite(order, output.buffer) {
                    return None;
                }
                inputs[input].overwritten_by = Some(index);
                overwrites.push((input, index));
            }
        }
        Some(overwrites)
    }
}

/// Returns how an instruction can be fused, or `None` if it cannot.
fn fusible(program: &Program, instr: &Instr) -> Option<Fusible> {
    let InstrKind::Compute(op) = &instr.kind else { return None };
    let fusible = op.cuda_fusible()?;
    let mut operands = instr.inputs.iter().chain(&instr.outputs);
    let sums = fusible == Fusible::NormGradWeight;
    let reads_ids = matches!(fusible, Fusible::EmbeddingGrad { .. });
    let is_plain = (instr.accumulate == 0 || sums)
        && (instr.workspace.is_empty() || sums || reads_ids || fusible == Fusible::Product)
        && instr.defines_count.is_none()
        && instr.predicate.is_none()
        && operands.all(|operand| {
            let is_counted = program.buffers[operand.buffer.index()].dynamic_rows.is_some();
            let is_id = reads_ids && operand.dtype == DType::U32;
            !is_counted && (is_id || matches!(operand.dtype, DType::F32 | DType::BF16 | DType::U8))
        });
    let elements = count(instr.outputs.first()?);
    let fits = match &fusible {
        Fusible::Each { constants, .. } => {
            instr.inputs.len().max(constants.len()) <= MAX_NAMED
                && instr.inputs.iter().all(|input| count(input) == elements && can_walk(&input.layout))
                && instr.outputs.iter().all(|output| count(output) == elements)
                && fusible.is_well_formed(instr.inputs.len())
        }
        Fusible::Norm { .. } => instr.inputs.iter().all(|input| input.overwritten_by.is_none()),
        Fusible::NormGradWeight => fits_one_pass(&spec(&instr.inputs[0])),
        Fusible::NormGradInput { .. } | Fusible::EmbeddingGrad { .. } | Fusible::Product => true,
    };
    (is_plain && fits && elements > 0 && instr.outputs.iter().all(|output| is_whole(program, output)))
        .then_some(fusible)
}

/// True if an operand covers its whole buffer, with the elements in order.
fn is_whole(program: &Program, operand: &Operand) -> bool {
    let bytes = count(operand) * operand.dtype.size_in_bytes();
    operand.layout.is_contiguous()
        && operand.layout.start_offset() == 0
        && bytes as u64 == program.buffers[operand.buffer.index()].bytes
}

fn spec(operand: &Operand) -> Spec {
    Spec { shape: operand.layout.shape().clone(), dtype: operand.dtype }
}

fn count(operand: &Operand) -> usize {
    operand.layout.shape().elem_count()
}

/// True if two operands are the same elements in the same order.
fn is_same(a: &Operand, b: &Operand) -> bool {
    let dense =
        |operand: &Operand| operand.layout.is_contiguous().then(|| (operand.layout.start_offset(), count(operand)));
    let lies = |operand: &Operand| {
        let layout = &operand.layout;
        (layout.dims().to_vec(), layout.stride().to_vec(), layout.start_offset())
    };
    let alike = match (dense(a), dense(b)) {
        (Some(a), Some(b)) => a == b,
        _ => lies(a) == lies(b),
    };
    a.buffer == b.buffer && a.dtype == b.dtype && alike
}
