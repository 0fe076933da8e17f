//! PyTorch memory snapshots, as `torch.cuda.memory._dump_snapshot` writes them.
//!
//! In: the pickle, from an untrusted source. Out: the lifetime of every recorded allocation, ready for planning and
//! replay. The file may contain plain data only; reading it imports and calls nothing (see `pickle`).

mod pickle;

use std::collections::{HashMap, HashSet};
use std::io::Read;

use gapless_alloc::{Buffer, Problem};
use pickle::{Pickle, ValueId};
use serde::Serialize;

use crate::Stream;

/// Larger files are not read.
const LARGEST_FILE: u64 = 2 << 30;
const MAX_BLOCKS: usize = 1 << 26;
const MAX_DEVICES: usize = 1 << 10;
const MAX_REFUSED: usize = 16;

/// The allocations of one device.
#[derive(Debug, Clone)]
pub struct Snapshot {
    /// Lifetimes of the allocations. Each event of the trace is a tick. Allocations from before the recording live from
    /// tick 0 on. Allocations that still existed when the recording ended live to the last tick.
    pub problem: Problem,
    /// The stream of each allocation, indexed by [`BufferId`](gapless_alloc::BufferId). Streams are numbered by first
    /// appearance.
    pub streams: Vec<Stream>,
    /// Number of the device.
    pub device: usize,
    /// Bytes that PyTorch had taken from the device when the snapshot was taken.
    pub reserved: u64,
    /// The last 16 requests that PyTorch could not serve, in order. They are not part of the problem.
    pub refused: Vec<Refused>,
}

/// A request for which PyTorch was out of memory, and the state of the device at that time.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Refused {
    /// Index of the request's event in the device's trace, counted from 0.
    pub event: usize,
    /// Tick of the problem after which the request came.
    pub tick: u64,
    /// Bytes requested, as PyTorch rounds them.
    pub bytes: u64,
    /// Bytes of the device that were free.
    pub device_free: u64,
    /// Bytes that PyTorch had taken from the device.
    pub reserved: u64,
    /// Bytes of `reserved` that the program held.
    pub allocated: u64,
    /// Stream of the request, numbered as in [`Snapshot::streams`].
    #[serde(skip)]
    pub stream: Stream,
}

impl Refused {
    /// Bytes of the device that another allocator could have used in PyTorch's place.
    pub fn capacity(&self) -> u64 {
        self.reserved.saturating_add(self.device_free)
    }
}

impl Snapshot {
    /// Returns the program up to a refused request, which becomes the last buffer of the problem.
    ///
    /// # Errors
    /// Returns an error in the same cases as [`Problem::new`].
    pub fn until(&self, refused: &Refused) -> Result<Self, SnapshotError> {
        let (asked, end) = (refused.tick + 1, refused.tick + 2);
        let (mut buffers, mut streams) = (Vec::new(), Vec::new());
        for (buffer, &stream) in self.problem.buffers().iter().zip(&self.streams) {
            let lifetime = buffer.lifetime.clone();
            if lifetime.start < asked {
                let until = if lifetime.end <= refused.tick { lifetime.end } else { end };
                buffers.push(Buffer::new(lifetime.start..until, buffer.bytes));
                streams.push(stream);
            }
        }
        buffers.push(Buffer::new(asked..end, refused.bytes));
        streams.push(refused.stream);
        let problem = Problem::new(buffers).map_err(Box::new)?;
        Ok(Self { problem, streams, refused: Vec::new(), ..*self })
    }
}

/// The error of a snapshot that cannot be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages name the fields")]
pub enum SnapshotError {
    #[error("the file ends at byte {byte}, in the middle of the pickle: it is cut off, or not a pickle")]
    Truncated { byte: u64 },
    #[error(
        "byte {byte}: the pickle has opcode {opcode:#04x}; only plain data (lists, dicts, text and numbers) are read, and no \
         code is run; write the file with torch.cuda.memory._dump_snapshot"
    )]
    NotPlainData { byte: u64, opcode: u8 },
    #[error("byte {byte}: this is not what Python's pickle module writes")]
    Malformed { byte: u64 },
    #[error("more than {limit} {what}; record fewer events (_record_memory_history(max_entries=…), stacks=\"python\")")]
    TooLarge { what: &'static str, limit: u64 },
    #[error("not a memory snapshot: {what}")]
    NotASnapshot { what: String },
    #[error("no allocation was recorded; call torch.cuda.memory._record_memory_history() before the run")]
    Empty,
    #[error("device {device} has no trace; choose one of {known:?}")]
    NoDevice { device: usize, known: Vec<usize> },
    #[error("several devices have traces; choose one of {known:?}")]
    SeveralDevices { known: Vec<usize> },
    #[error("event {event} of device {device}: {what}")]
    Event { device: usize, event: usize, what: String },
    #[error("cannot read the snapshot")]
    Io(#[from] std::io::Error),
    #[error(transparent)]
    Problem(#[from] Box<gapless_alloc::Error>),
}

/// Reads the allocations of `device`. With `None`, reads those of the only device that has any.
///
/// # Errors
/// Returns [`SnapshotError`] if the file ends early, is not plain data, is too large or is not a snapshot, or if its
/// events contradict each other.
pub fn read_snapshot(input: impl Read, device: Option<usize>) -> Result<Snapshot, SnapshotError> {
    let mut bytes = Vec::new();
    input.take(LARGEST_FILE + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > LARGEST_FILE {
        return Err(SnapshotError::TooLarge { what: "bytes", limit: LARGEST_FILE });
    }
    let pickle = Pickle::read(&bytes)?;
    let missing = || SnapshotError::NotASnapshot { what: "it has no device_traces".into() };
    let traces = pickle.field(pickle.root(), "device_traces").ok_or_else(missing)?;
    let traces = list(&pickle, traces, "device_traces")?;
    let has_events = |device: &usize| pickle.list(traces[*device]).is_none_or(|events| !events.is_empty());
    let known: Vec<usize> = (0..traces.len()).filter(has_events).take(MAX_DEVICES).collect();
    let device = match (device, known.as_slice()) {
        (Some(device), _) if known.contains(&device) => device,
        (Some(device), _) => return Err(SnapshotError::NoDevice { device, known }),
        (None, []) => return Err(SnapshotError::Empty),
        (None, [only]) => *only,
        (None, _) => return Err(SnapshotError::SeveralDevices { known }),
    };
    let events = list(&pickle, traces[device], "a device trace")?;
    let events = events.iter().map(|&id| Entry::decode(&pickle, id)).collect::<Result<Vec<_>, _>>()?;
    lifetimes(&events, &blocks(&pickle, device)?, device)
}

/// A block of a segment, as it was when the snapshot was taken.
#[derive(Debug)]
struct SegmentBlock {
    address: i64,
    bytes: u64,
    requested: u64,
    stream: i64,
    /// True if the program or another stream uses the block.
    active: bool,
}

/// All blocks of a device.
fn blocks(pickle: &Pickle, device: usize) -> Result<Vec<SegmentBlock>, SnapshotError> {
    let mut blocks = Vec::new();
    let Some(segments) = pickle.field(pickle.root(), "segments") else { return Ok(blocks) };
    for &segment in list(pickle, segments, "segments")? {
        if integer(pickle, segment, "device").unwrap_or(0) != device {
            continue;
        }
        let stream = integer(pickle, segment, "stream").unwrap_or(0);
        let mut address: i64 = integer(pickle, segment, "address")?;
        let what = || SnapshotError::NotASnapshot { what: "a segment has no blocks".into() };
        let in_segment = list(pickle, pickle.field(segment, "blocks").ok_or_else(what)?, "blocks")?;
        // Several entries may refer to one list. So the number of blocks read must be bounded, not only the number in
        // the file.
        if blocks.len() + in_segment.len() > MAX_BLOCKS {
            return Err(SnapshotError::TooLarge { what: "blocks", limit: MAX_BLOCKS as u64 });
        }
        for &block in in_segment {
            let state = pickle.field(block, "state").and_then(|state| pickle.text(state));
            let active = state.is_some_and(|state| state.starts_with(b"active"));
            let bytes = integer(pickle, block, "size")?;
            let requested = integer(pickle, block, "requested_size").ok().filter(|&requested| requested > 0);
            blocks.push(SegmentBlock { address, bytes, requested: requested.unwrap_or(bytes), stream, active });
            address = address.saturating_add_unsigned(bytes);
        }
    }
    Ok(blocks)
}

#[derive(Debug)]
struct Entry {
    action: Action,
    /// The address of the block. For a refused request, the free bytes of the device.
    address: i64,
    bytes: i64,
    stream: i64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Action {
    Allocate,
    /// The program freed the block.
    Free,
    /// All streams have finished with the block.
    FreeCompleted,
    /// PyTorch was out of memory.
    Refused,
    /// PyTorch took memory from the device.
    Take,
    /// PyTorch returned memory to the device.
    GiveBack,
    /// Snapshots and other events that are neither allocations nor frees.
    Other,
}

impl Entry {
    fn decode(pickle: &Pickle, id: ValueId) -> Result<Self, SnapshotError> {
        let action = match pickle.field(id, "action").and_then(|action| pickle.text(action)) {
            Some(b"alloc") => Action::Allocate,
            Some(b"free_requested") => Action::Free,
            Some(b"free_completed") => Action::FreeCompleted,
            Some(b"oom") => Action::Refused,
            Some(b"segment_alloc" | b"segment_map") => Action::Take,
            Some(b"segment_free" | b"segment_unmap") => Action::GiveBack,
            Some(_) => return Ok(Self { action: Action::Other, address: 0, bytes: 0, stream: 0 }),
            None => return Err(SnapshotError::NotASnapshot { what: "an event has no action".into() }),
        };
        Ok(Self {
            action,
            address: match action {
                Action::Refused => integer(pickle, id, "device_free").unwrap_or(0),
                Action::Take | Action::GiveBack => 0,
                _ => integer(pickle, id, "addr")?,
            },
            bytes: integer(pickle, id, "size")?,
            stream: integer(pickle, id, "stream").unwrap_or(0),
        })
    }
}

fn list<'p>(pickle: &'p Pickle, id: ValueId, name: &str) -> Result<&'p [ValueId], SnapshotError> {
    pickle.list(id).ok_or_else(|| SnapshotError::NotASnapshot { what: format!("{name} is not a list") })
}

fn integer<T: TryFrom<i64>>(pickle: &Pickle, id: ValueId, key: &str) -> Result<T, SnapshotError> {
    let found = pickle.field(id, key).and_then(|value| pickle.integer(value)).and_then(|i| T::try_from(i).ok());
    found.ok_or_else(|| SnapshotError::NotASnapshot { what: format!("{key} is missing somewhere or not a number") })
}

fn lifetimes(events: &[Entry], blocks: &[SegmentBlock], device: usize) -> Result<Snapshot, SnapshotError> {
    let held = blocks.iter().fold(0, |sum: u64, block| sum.saturating_add(block.bytes));
    let mut history = History::default();
    for (event, entry) in events.iter().enumerate() {
        history.record(entry).map_err(|what| SnapshotError::Event { device, event, what })?;
    }
    for block in blocks.iter().filter(|block| block.active && !history.seen.contains(&block.address)) {
        history.allocations.push(Allocation { start: 0, end: None, bytes: block.requested, stream: block.stream });
    }
    let end = history.tick + 1;
    let mut numbers: HashMap<i64, u32> = HashMap::new();
    let mut number = |stream: i64| {
        let next = numbers.len() as u32;
        Stream(*numbers.entry(stream).or_insert(next))
    };
    let (mut buffers, mut streams) = (Vec::new(), Vec::new());
    for allocation in &history.allocations {
        buffers.push(Buffer::new(allocation.start..allocation.end.unwrap_or(end), allocation.bytes));
        streams.push(number(allocation.stream));
    }
    let refused = refused(events, &history, held, number);
    let problem = Problem::new(buffers).map_err(Box::new)?;
    Ok(Snapshot { problem, streams, device, reserved: held, refused })
}

/// Returns the requests that PyTorch could not serve. The bytes that PyTorch held at each of these requests are
/// computed backwards from `held`, the bytes at the end of the trace.
fn refused(events: &[Entry], history: &History, held: u64, mut number: impl FnMut(i64) -> Stream) -> Vec<Refused> {
    let (mut refused, mut reserved, mut tick) = (Vec::new(), held, history.tick);
    for (event, entry) in events.iter().enumerate().rev() {
        let bytes = u64::try_from(entry.bytes).unwrap_or(0);
        match entry.action {
            Action::Take => reserved = reserved.saturating_sub(bytes),
            Action::GiveBack => reserved = reserved.saturating_add(bytes),
            Action::Refused if refused.len() < MAX_REFUSED => {
                let is_alive = |it: &&Allocation| it.start <= tick && it.end.is_none_or(|end| end > tick);
                let allocated = history.allocations.iter().filter(is_alive).map(|it| it.bytes);
                let device_free = u64::try_from(entry.address).unwrap_or(0);
                refused.push(Refused {
                    event,
                    tick,
                    bytes,
                    device_free,
                    reserved,
                    allocated: allocated.fold(0, u64::saturating_add),
                    stream: number(entry.stream),
                });
            }
            Action::Allocate | Action::Free | Action::FreeCompleted => tick -= 1,
            Action::Refused | Action::Other => {}
        }
    }
    refused.reverse();
    refused
}

/// An allocation that is being reconstructed.
#[derive(Debug)]
struct Allocation {
    start: u64,
    end: Option<u64>,
    bytes: u64,
    stream: i64,
}

/// A device's allocations, reconstructed from its events in order.
#[derive(Debug, Default)]
struct History {
    allocations: Vec<Allocation>,
    /// Allocations that the program holds, by address.
    live: HashMap<i64, usize>,
    /// Allocations that the program has freed, but that other streams still use, by address.
    pending: HashMap<i64, usize>,
    /// All addresses seen so far. If a block at any other address is freed, it was allocated before the recording
    /// began.
    seen: HashSet<i64>,
    /// Tick of the latest event. The first event has tick 1.
    tick: u64,
}

impl History {
    fn record(&mut self, entry: &Entry) -> Result<(), String> {
        let Entry { action, address, bytes, stream } = *entry;
        if !matches!(action, Action::Allocate | Action::Free | Action::FreeCompleted) {
            return Ok(());
        }
        let bytes = u64::try_from(bytes).map_err(|_| format!("size {bytes} is negative"))?;
        self.tick += 1;
        let known = !self.seen.insert(address);
        if action == Action::Allocate {
            let index = self.add(Allocation { start: self.tick, end: None, bytes, stream });
            return match self.live.insert(address, index) {
                Some(_) => Err(format!("address {address:#x} is allocated twice with no free between")),
                None => Ok(()),
            };
        }
        let requested = action == Action::Free;
        let held = if requested { self.live.remove(&address) } else { self.pending.remove(&address) };
        let index = match held {
            Some(index) => index,
            None if known => return Err(format!("address {address:#x} is freed twice with no allocation between")),
            None => self.add(Allocation { start: 0, end: None, bytes, stream }),
        };
        self.allocations[index].end = Some(self.tick);
        if requested {
            self.pending.insert(address, index);
        }
        Ok(())
    }

    fn add(&mut self, allocation: Allocation) -> usize {
        self.allocations.push(allocation);
        self.allocations.len() - 1
    }
}
