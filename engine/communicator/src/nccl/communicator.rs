//! The [`Communicator`] interface over NCCL.

use std::sync::Arc;
use std::time::Duration;

use super::operation::Operation;
use super::{MAX_LEFT_TO_DEVICE, Nccl, Sums, heartbeat};
use crate::backend::world_rank;
use crate::launch_order::{Call, Kind, LaunchOrder, LaunchQueue, Start};
use crate::{Awaited, Collective, Communicator, CommunicatorError, Memory, Request, Result, Tag};

// SAFETY: lent memory is not accessed any more
// - after `wait` without an error, because the operation's event has completed;
// - by work that is launched after `wait_on_device`, because the compute stream waits for the same event;
// - after an error, because `fail` aborts the rank's communicators and waits for the stream that runs their operations;
// - after a drop. If operations are in progress, the drop fails the rank in the same way; otherwise nothing is lent.
//   All addresses are those of a device.
unsafe impl Communicator for Nccl {
    fn rank(&self) -> usize {
        self.control.rank()
    }

    fn size(&self) -> usize {
        self.members.len()
    }

    fn memory(&self) -> Memory {
        Memory::Device
    }

    fn set_timeout(&mut self, timeout: Duration) {
        self.timeout = timeout;
        self.control.set_timeout(timeout);
    }

    unsafe fn isend(&mut self, bytes: *const u8, len: usize, to: usize, tag: Tag) -> Result<Request> {
        world_rank(&self.members, to)?;
        // SAFETY: by this function's contract.
        unsafe { self.begin(Operation::Send { bytes, len, to, tag }) }
    }

    unsafe fn irecv(&mut self, bytes: *mut u8, len: usize, from: usize, tag: Tag) -> Result<Request> {
        world_rank(&self.members, from)?;
        // SAFETY: by this function's contract.
        unsafe { self.begin(Operation::Receive { bytes, len, from, tag }) }
    }

    unsafe fn start(&mut self, collective: Collective) -> Result<Request> {
        match collective.kind() {
            Kind::Broadcast { root, .. } => drop(world_rank(&self.members, root)?),
            Kind::AllReduce { .. } | Kind::ReduceScatter { .. }
                if self.sums == Sums::InOrder && self.members.len() > 2 =>
            {
                return Err(CommunicatorError::Unsupported {
                    what: "a sum in the order of ranks over more than two GPUs",
                    remedy: "allow NCCL's own order with set_sums(Sums::AnyOrder), whose bits are not those of other backends",
                });
            }
            _ => {}
        }
        // SAFETY: by this function's contract.
        unsafe { self.begin(Operation::Collective(collective)) }
    }

    fn wait(&mut self, request: Request) -> Result<()> {
        let index = self.launched(request)?;
        self.end_of(index)
    }

    fn agree(&mut self, program: &[Call]) -> Result<Option<Arc<LaunchOrder>>> {
        self.check_failure()?;
        self.bind()?;
        let order = LaunchOrder::agree(&mut *self.control, program)?;
        let peers = order.starts().iter().filter_map(|start| match *start {
            Start::Send { to: peer, .. } | Start::Receive { from: peer, .. } => Some(peer),
            Start::Collective(_) => None,
        });
        let me = self.control.rank();
        self.greet(&peers.filter(|&peer| peer != me).collect())?;
        Ok(Some(Arc::new(order)))
    }

    /// Begins a run of a program. Outside of a run, only collectives can be started.
    fn follow(&mut self, order: &Arc<LaunchOrder>) -> Result<()> {
        self.check_failure()?;
        if self.run.is_some() {
            return Err(CommunicatorError::Unsupported {
                what: "a run of a program before the end of another on the same communicator",
                remedy: "start all agreed operations of the first run before, or split the communicator",
            });
        }
        self.started.clear();
        self.started.reserve(order.starts().len());
        let queue = LaunchQueue::new(order);
        self.run = (!queue.is_over()).then_some(queue);
        Ok(())
    }

    fn wait_on_device(&mut self, request: Request) -> Result<()> {
        let index = self.launched(request)?;
        let waits = self.slots[index].hold_up(&self.compute);
        waits.map_err(|error| self.fail(error))?;
        self.left.push_back(index);
        // Settling now keeps the driver's queue from getting full. On a full queue, the host would block without
        // checking for failures of other ranks.
        self.wait_until_at_most(MAX_LEFT_TO_DEVICE)
    }

    fn settle(&mut self) -> Result<()> {
        self.check_failure()?;
        if self.left.is_empty() {
            return Ok(());
        }
        self.wait_until_at_most(0)?;
        // A failing rank first reports its failure and then aborts its communicators, which may end operations that
        // wait for it. So this rank looks for such a report before it uses results.
        heartbeat(&mut *self.control).map_err(|error| self.fail(error))
    }

    fn split(&mut self, color: usize, key: usize) -> Result<Box<dyn Communicator>> {
        const WORD: usize = size_of::<usize>();
        self.check_failure()?;
        let mut part = self.control.split(color, key).map_err(|error| self.fail(error))?;
        let mut members = vec![0; WORD * part.size()];
        part.all_gather(&self.me().to_ne_bytes(), &mut members).map_err(|error| self.fail(error))?;
        let members =
            members.chunks_exact(WORD).map(|word| usize::from_ne_bytes(word.try_into().expect("a word's bytes")));
        let mut part = Self::join(part, members.collect(), &self.compute, self.family.clone(), self.timeout)?;
        part.sums = self.sums;
        Ok(Box::new(part))
    }

    fn abort(&mut self, reason: &str) {
        let (rank, why) = (self.me(), reason.to_owned());
        self.failure.get_or_insert(CommunicatorError::PeerGone { rank, why, by: rank, awaited: Awaited::Start });
        self.control.abort(reason);
        self.end();
    }
}
