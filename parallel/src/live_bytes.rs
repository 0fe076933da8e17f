//! Exact bytes alive on a rank over time, from the bytes that each stage creates and keeps per micro-batch.
//!
//! ```text
//!            RECV_F   F─────────┐        RECV_B   I─────────┐        W─────────┐
//! input      ├────────┴─────────┤ … until its last reader …
//! saved      ·        ├─────────┴─────────────────┴─────────┤ (freed by I) …───┤ (freed by W)
//! output     ·        ├─────────┴─ … WAIT_SEND_F
//! gradient   ·        ·                  ├────────┴─────────┤ … or until W
//! kept       ·        ·                           ├─────────┴──────────────────┤
//! ```
//!
//! Within a rank, the order of the cells alone determines which buffers are alive together. A buffer is born at the
//! start of the cell that creates it, and dies at the end of its last reader's cell. So the peak does not depend on the
//! costs.

use std::collections::{BTreeMap, BTreeSet};

use crate::{Action, Cell, Communication, CommunicationKind, Kind, MicroBatch, StageId, Timeline};

/// Bytes of one stage for one micro-batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StageBytes {
    /// The activation from the stage before: a receive buffer, or the output of a stage on the same rank.
    pub input: u64,
    /// The last reader of the input.
    pub input_until: LastReader,
    /// The gradient of the input, which is sent to the stage before. Stage 0 may have none.
    pub input_gradient: u64,
    /// True if W, too, reads the gradient from the next stage; false if only I reads it.
    pub weight_reads_gradient: bool,
    /// Bytes that F keeps for the backward and that I is the last to read. The input is not included.
    pub saved_until_input: u64,
    /// Bytes that F keeps for the backward and that W is the last to read. The input is not included.
    pub saved_until_weight: u64,
    /// Bytes that I computes and that are kept until W. A backward that is not split consumes such values piece by
    /// piece, so it is assumed to keep none.
    pub kept_by_input: u64,
}

/// The last reader of a buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LastReader {
    /// F.
    #[default]
    Forward,
    /// I, or the whole backward.
    InputGradient,
    /// W, or the whole backward.
    WeightGradient,
}

impl Timeline {
    /// Returns the bytes alive on a rank, at each tick where this number changes. `bytes` is indexed by stage; a
    /// missing stage counts as zero bytes.
    ///
    /// A receive buffer lives from its receive on. A send buffer lives until its wait, or until its send if the table
    /// has no waits. In a table without communication, messages arrive right before the actions that need them, and are
    /// sent right after the actions that create them.
    pub fn live_bytes(&self, rank: usize, bytes: &[StageBytes]) -> Vec<(u64, u64)> {
        let stages: BTreeSet<StageId> =
            self.ranks[rank].iter().flat_map(|span| span.cell.actions()).map(|action| action.stage).collect();
        let kinds = self.ranks[rank].iter().filter_map(|span| match span.cell {
            Cell::Communicate(communication) => Some(communication.kind),
            _ => None,
        });
        let mut memory = Memory { bytes, stages, kinds: kinds.collect(), alive: BTreeMap::new(), now: 0 };
        let mut live = Vec::new();
        for span in &self.ranks[rank] {
            memory.start(&span.cell);
            live.push((span.start, memory.now));
            memory.end(&span.cell);
            live.push((span.end, memory.now));
        }
        let mut before = 0;
        live.retain(|&(_, now)| std::mem::replace(&mut before, now) != now);
        live
    }

    /// Returns the maximum of [`Timeline::live_bytes`].
    pub fn peak_bytes(&self, rank: usize, bytes: &[StageBytes]) -> u64 {
        self.live_bytes(rank, bytes).into_iter().map(|(_, live)| live).max().unwrap_or_default()
    }
}

/// A live buffer. A message is keyed by the stage that reads the message. All other buffers are keyed by the stage that
/// creates them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum BufferKind {
    Input,
    OutputGradient,
    SentOutput,
    SentGradient,
    SavedUntilInput,
    SavedUntilWeight,
    KeptByInput,
}

struct Memory<'a> {
    bytes: &'a [StageBytes],
    /// The stages that run on this rank.
    stages: BTreeSet<StageId>,
    /// The kinds of communication that occur on this rank.
    kinds: BTreeSet<CommunicationKind>,
    alive: BTreeMap<(BufferKind, StageId, MicroBatch), u64>,
    now: u64,
}

impl Memory<'_> {
    /// Handles births at the start of a cell.
    fn start(&mut self, cell: &Cell) {
        if let Cell::Communicate(Communication { kind, stage, micro_batch: Some(micro_batch) }) = *cell {
            match kind {
                CommunicationKind::ReceiveForward => self.birth(BufferKind::Input, stage, micro_batch),
                CommunicationKind::ReceiveBackward => self.birth(BufferKind::OutputGradient, stage, micro_batch),
                _ => {}
            }
        }
        for Action { kind, stage, micro_batch } in cell.actions() {
            if kind == Kind::Forward {
                // If no receive brings the stage's input, the input becomes alive here. An input that was received, or
                // that a stage of this rank has computed, is already alive, and `birth` changes nothing.
                self.birth(BufferKind::Input, stage, micro_batch);
                self.birth(BufferKind::SavedUntilInput, stage, micro_batch);
                self.birth(BufferKind::SavedUntilWeight, stage, micro_batch);
                let below = StageId(stage.0.saturating_add(1));
                let own = self.stages.contains(&below);
                self.birth_of(if own { BufferKind::Input } else { BufferKind::SentOutput }, below, stage, micro_batch);
            }
            if matches!(kind, Kind::Backward | Kind::BackwardInput) {
                self.birth(BufferKind::OutputGradient, stage, micro_batch);
                if let Some(above) = stage.0.checked_sub(1).map(StageId) {
                    let own = self.stages.contains(&above);
                    self.birth_of(
                        if own { BufferKind::OutputGradient } else { BufferKind::SentGradient },
                        above,
                        stage,
                        micro_batch,
                    );
                }
            }
            if kind == Kind::BackwardInput {
                self.birth(BufferKind::KeptByInput, stage, micro_batch);
            }
        }
    }

    /// Handles deaths at the end of a cell.
    fn end(&mut self, cell: &Cell) {
        if let Cell::Communicate(Communication { kind, stage, micro_batch: Some(micro_batch) }) = *cell {
            let waits = |kind| self.kinds.contains(&kind);
            match kind {
                CommunicationKind::WaitSendForward => self.death(BufferKind::SentOutput, stage, micro_batch),
                CommunicationKind::WaitSendBackward => self.death(BufferKind::SentGradient, stage, micro_batch),
                CommunicationKind::SendForward if !waits(CommunicationKind::WaitSendForward) => {
                    self.death(BufferKind::SentOutput, stage, micro_batch);
                }
                CommunicationKind::SendBackward if !waits(CommunicationKind::WaitSendBackward) => {
                    self.death(BufferKind::SentGradient, stage, micro_batch);
                }
                _ => {}
            }
        }
        for Action { kind, stage, micro_batch } in cell.actions() {
            let of_stage = self.stage_bytes(stage);
            let input = matches!(kind, Kind::Backward | Kind::BackwardInput);
            let weight = matches!(kind, Kind::Backward | Kind::BackwardWeight);
            let reads_input_last = match of_stage.input_until {
                LastReader::Forward => kind == Kind::Forward,
                LastReader::InputGradient => input,
                LastReader::WeightGradient => weight,
            };
            let reads_gradient_last = if of_stage.weight_reads_gradient { weight } else { input };
            for (what, last) in [
                (BufferKind::Input, reads_input_last),
                (BufferKind::OutputGradient, reads_gradient_last),
                (BufferKind::SavedUntilInput, input),
                (BufferKind::SavedUntilWeight, weight),
                (BufferKind::KeptByInput, weight),
                (
                    BufferKind::SentOutput,
                    kind == Kind::Forward && !self.kinds.contains(&CommunicationKind::SendForward),
                ),
                (BufferKind::SentGradient, input && !self.kinds.contains(&CommunicationKind::SendBackward)),
            ] {
                if last {
                    self.death(what, stage, micro_batch);
                }
            }
        }
    }

    fn birth(&mut self, what: BufferKind, stage: StageId, micro_batch: MicroBatch) {
        self.birth_of(what, stage, stage, micro_batch);
    }

    /// Records the birth of a message between two stages. If the reader is on this rank, the message is keyed by the
    /// reader, otherwise by its maker.
    fn birth_of(&mut self, what: BufferKind, reader: StageId, maker: StageId, micro_batch: MicroBatch) {
        let (owner, bytes) = match what {
            BufferKind::Input => (reader, self.stage_bytes(reader).input),
            BufferKind::SentOutput => (maker, self.stage_bytes(reader).input),
            BufferKind::OutputGradient => {
                (reader, self.stage_bytes(StageId(reader.0.saturating_add(1))).input_gradient)
            }
            BufferKind::SentGradient => (maker, self.stage_bytes(maker).input_gradient),
            BufferKind::SavedUntilInput => (maker, self.stage_bytes(maker).saved_until_input),
            BufferKind::SavedUntilWeight => (maker, self.stage_bytes(maker).saved_until_weight),
            BufferKind::KeptByInput => (maker, self.stage_bytes(maker).kept_by_input),
        };
        if self.alive.insert((what, owner, micro_batch), bytes).is_none() {
            self.now += bytes;
        }
    }

    fn death(&mut self, what: BufferKind, stage: StageId, micro_batch: MicroBatch) {
        self.now -= self.alive.remove(&(what, stage, micro_batch)).unwrap_or_default();
    }

    fn stage_bytes(&self, stage: StageId) -> StageBytes {
        self.bytes.get(stage.0 as usize).copied().unwrap_or_default()
    }
}
