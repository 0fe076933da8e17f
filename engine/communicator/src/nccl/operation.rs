//! One operation: its addresses, its entry in an agreed order, and the NCCL calls that execute it.

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaEvent, CudaStream, DriverError, result, sys};

use super::all;
use super::raw::Comm;
use crate::launch_order::Start;
use crate::{Awaited, Collective, CommunicatorError, Result, Tag};

/// An operation that a rank has started, with its device addresses.
#[derive(Debug, Clone, Copy)]
pub(super) enum Operation {
    Send { bytes: *const u8, len: usize, to: usize, tag: Tag },
    Receive { bytes: *mut u8, len: usize, from: usize, tag: Tag },
    Collective(Collective),
}

/// An operation and its progress. Slots are reused, so that a step creates no events in its steady state.
pub(super) struct Slot {
    pub(super) operation: Operation,
    pub(super) status: Status,
    /// Marks the point of the rank's computation at which the operation was started.
    ready: CudaEvent,
    /// Marks the operation's end.
    done: CudaEvent,
}

// SAFETY: sending an address is harmless; only `launch` uses it.
unsafe impl Send for Slot {}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Status {
    Free,
    /// Started, and waiting for its turn in the agreed order.
    Held,
    Launched,
    /// Launched; the device, not the host, waits for its end.
    LeftToDevice,
}

impl Operation {
    pub(super) fn start(&self) -> Start {
        match *self {
            Self::Send { len, to, tag, .. } => Start::Send { to, tag, len },
            Self::Receive { len, from, tag, .. } => Start::Receive { from, tag, len },
            Self::Collective(collective) => Start::Collective(collective.kind()),
        }
    }

    /// Describes a wait for this operation, for errors. `members` are the world ranks of the group.
    pub(super) fn awaited(&self, members: &[usize]) -> Awaited {
        match *self {
            Self::Send { to, tag, .. } => Awaited::Taken { to: members[to], tag },
            Self::Receive { from, tag, .. } => Awaited::Message { from: members[from], tag },
            Self::Collective(collective) => all(&collective.to_string()),
        }
    }

    /// Returns an error unless the first and the last byte of every range that NCCL would get are device memory.
    ///
    /// # Safety
    /// The sizes of an all-to-all must be valid for `ranks` entries, in host memory.
    pub(super) unsafe fn expect_on_device(&self, ranks: usize, context: &CudaContext) -> Result<()> {
        const F32: usize = size_of::<f32>();
        let expect = |address: *const u8, len: usize| expect_on_device(address as usize, len, context.ordinal());
        match *self {
            Self::Send { bytes, len, .. } => expect(bytes, len),
            Self::Receive { bytes, len, .. } => expect(bytes, len),
            Self::Collective(Collective::AllReduce { values, count }) => expect(values.cast(), F32 * count),
            Self::Collective(Collective::ReduceScatter { send, receive, count }) => {
                expect(send.cast(), F32 * count * ranks)?;
                expect(receive.cast(), F32 * count)
            }
            Self::Collective(Collective::AllGather { send, receive, len }) => {
                expect(send, len)?;
                expect(receive, len * ranks)
            }
            Self::Collective(Collective::AllToAllV { send, send_lens, receive, receive_lens }) => {
                // SAFETY: by this function's contract.
                let total = |lens: *const usize| (0..ranks).map(|rank| unsafe { *lens.add(rank) }).sum();
                expect(send, total(send_lens))?;
                expect(receive, total(receive_lens))
            }
            Self::Collective(Collective::Broadcast { bytes, len, .. }) => expect(bytes, len),
            Self::Collective(Collective::Barrier) => Ok(()),
        }
    }

    /// Enqueues the operation on a stream. `word` is 4 bytes of device memory, for operations that need device memory
    /// of their own.
    ///
    /// # Safety
    /// The operation's memory must stay lent until the stream has executed it.
    unsafe fn enqueue(&self, comm: &Comm, ranks: usize, stream: &CudaStream, word: *mut f32) -> Result<()> {
        let stream = stream.cu_stream().cast();
        // SAFETY: by this function's contract. Sizes and allowed overlaps are those in the documentation of
        // `Collective`.
        unsafe {
            match *self {
                // Empty messages are left out at both ends.
                Self::Send { len: 0, .. } | Self::Receive { len: 0, .. } => Ok(()),
                Self::Send { bytes, len, to, .. } => comm.send(bytes, len, to, stream),
                Self::Receive { bytes, len, from, .. } => comm.receive(bytes, len, from, stream),
                Self::Collective(Collective::AllReduce { values, count }) => comm.all_reduce(values, count, stream),
                Self::Collective(Collective::ReduceScatter { send, receive, count }) => {
                    comm.reduce_scatter(send, receive, count, stream)
                }
                Self::Collective(Collective::AllGather { send, receive, len }) => {
                    comm.all_gather(send, receive, len, stream)
                }
                Self::Collective(Collective::AllToAllV { send, send_lens, receive, receive_lens }) => {
                    comm.group(|| {
                        let (mut send, mut receive) = (send, receive);
                        for rank in 0..ranks {
                            let (sent, received) = (*send_lens.add(rank), *receive_lens.add(rank));
                            if sent > 0 {
                                comm.send(send, sent, rank, stream)?;
                            }
                            if received > 0 {
                                comm.receive(receive, received, rank, stream)?;
                            }
                            (send, receive) = (send.add(sent), receive.add(received));
                        }
                        Ok(())
                    })
                }
                Self::Collective(Collective::Broadcast { bytes, len, root }) => {
                    comm.broadcast(bytes, len, root, stream)
                }
                Self::Collective(Collective::Barrier) => comm.all_reduce(word, 1, stream),
            }
        }
    }
}

impl Slot {
    pub(super) fn new(context: &Arc<CudaContext>, operation: Operation) -> Result<Self> {
        let event = || context.new_event(None).map_err(cuda("cuEventCreate"));
        Ok(Self { operation, status: Status::Free, ready: event()?, done: event()? })
    }

    /// Assigns an operation to the slot. The operation may begin when `compute` has reached its current point.
    pub(super) fn hold(&mut self, operation: Operation, compute: &CudaStream) -> Result<()> {
        (self.operation, self.status) = (operation, Status::Held);
        self.ready.record(compute).map_err(cuda("cuEventRecord"))
    }

    /// Enqueues the operation after all operations that were enqueued before. NCCL may still be executing the call when
    /// this method returns.
    ///
    /// # Safety
    /// The operation's memory must stay lent until the operation has ended.
    pub(super) unsafe fn launch(&self, comm: &Comm, ranks: usize, stream: &CudaStream, word: *mut f32) -> Result<()> {
        stream.wait(&self.ready).map_err(cuda("cuStreamWaitEvent"))?;
        // SAFETY: by this function's contract.
        unsafe { self.operation.enqueue(comm, ranks, stream, word) }
    }

    /// Copies a message that a rank sends to itself. `receive` is the slot of the message's receive.
    ///
    /// # Safety
    /// The memory of both slots' operations must stay lent until these operations have ended.
    pub(super) unsafe fn copy_to(&self, receive: &Slot, stream: &CudaStream) -> Result<()> {
        let (Operation::Send { bytes: from, len, .. }, Operation::Receive { bytes: to, .. }) =
            (self.operation, receive.operation)
        else {
            unreachable!("a message to oneself is a send and a receive")
        };
        for slot in [self, receive] {
            stream.wait(&slot.ready).map_err(cuda("cuStreamWaitEvent"))?;
        }
        if len == 0 || from == to {
            return Ok(());
        }
        // SAFETY: by this function's contract. The send and the receive were matched, so they have the same length.
        let copied = unsafe { result::memcpy_dtod_async(to as u64, from as u64, len, stream.cu_stream()) };
        copied.map_err(cuda("cuMemcpyDtoDAsync"))
    }

    /// Records that the whole operation is on the stream.
    pub(super) fn launched(&mut self, stream: &CudaStream) -> Result<()> {
        self.status = Status::Launched;
        self.done.record(stream).map_err(cuda("cuEventRecord"))
    }

    /// Makes later launches on `compute` wait for the operation's end.
    pub(super) fn hold_up(&mut self, compute: &CudaStream) -> Result<()> {
        self.status = Status::LeftToDevice;
        compute.wait(&self.done).map_err(cuda("cuStreamWaitEvent"))
    }

    /// True if the operation has ended.
    pub(super) fn is_done(&self) -> Result<bool> {
        self.done.try_is_complete().map_err(cuda("cuEventQuery"))
    }
}

fn expect_on_device(address: usize, len: usize, device: usize) -> Result<()> {
    let refuse = |found: String| Err(CommunicatorError::NotOnDevice { address, len, device, found });
    let ends = if len == 0 { [None, None] } else { [Some(address), Some(address + (len - 1))] };
    for end in ends.into_iter().flatten() {
        use sys::CUpointer_attribute_enum as Attribute;
        match attribute::<u32>(Attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE, end) {
            Ok(kind) if kind == sys::CUmemorytype_enum::CU_MEMORYTYPE_DEVICE as u32 => {}
            Ok(_) => return refuse("memory of the host".into()),
            Err(_) => return refuse(format!("unknown to the driver ({end:#x})")),
        }
        match attribute::<i32>(Attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, end) {
            Ok(found) if found as usize == device => {}
            Ok(found) => return refuse(format!("of GPU {found}")),
            Err(error) => return refuse(error.to_string()),
        }
    }
    Ok(())
}

/// Queries the driver for an attribute of an address.
fn attribute<T: Default>(attribute: sys::CUpointer_attribute, address: usize) -> Result<T, DriverError> {
    let mut value = T::default();
    // SAFETY: `value` outlives the call, and both queried attributes have 4 bytes. The driver looks the address up and
    // does not dereference it.
    unsafe { sys::cuPointerGetAttribute((&raw mut value).cast(), attribute, address as u64) }.result()?;
    Ok(value)
}

/// Wraps an error of the driver, with the call that returned it.
pub(super) fn cuda(call: &'static str) -> impl Fn(DriverError) -> CommunicatorError {
    move |error| CommunicatorError::Cuda { call, what: error.to_string() }
}
