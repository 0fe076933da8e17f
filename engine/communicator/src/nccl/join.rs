//! Joining a group of ranks over NCCL.

use std::any::Any;
use std::collections::{BTreeSet, VecDeque};
use std::ffi::c_void;
use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr};

use super::family::Family;
use super::library::Library;
use super::operation::cuda;
use super::raw::{self, Comm, ID_BYTES};
use super::{Nccl, Sums, all};
use crate::backend::Owner;
use crate::{Communicator, Result};

impl Nccl {
    /// Connects this rank to the other ranks of `control`, on the GPU with index `ordinal` in this process. The rank's
    /// computation gets a new stream. This is a collective operation.
    ///
    /// # Errors
    /// If the driver or NCCL is missing, returns [`CommunicatorError::Missing`](crate::CommunicatorError::Missing)
    /// without contacting the other ranks. Also returns errors of NCCL, for example if two ranks use one GPU. If a rank
    /// gets an error, it drops its communicators, and the calls of the other ranks return errors.
    pub fn on_device(control: Box<dyn Communicator>, ordinal: usize) -> Result<Self> {
        Library::load()?;
        let context = CudaContext::new(ordinal).map_err(cuda("cuDevicePrimaryCtxRetain"))?;
        let compute = context.new_stream().map_err(cuda("cuStreamCreate"))?;
        Self::over(control, &compute)
    }

    /// Like [`Self::on_device`], with an existing compute stream of the GPU's primary context. `owner` keeps the stream
    /// alive.
    ///
    /// # Safety
    /// `stream` must be a valid stream for as long as `owner` lives.
    ///
    /// # Errors
    /// Returns an error in the same cases as [`Self::on_device`].
    pub unsafe fn on_stream(
        control: Box<dyn Communicator>,
        ordinal: usize,
        stream: *mut c_void,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Result<Self> {
        Library::load()?;
        let context = CudaContext::new(ordinal).map_err(cuda("cuDevicePrimaryCtxRetain"))?;
        // SAFETY: by this function's contract.
        let compute = unsafe { context.wrap_borrowed_stream(stream.cast()) };
        Self::of_all(control, &compute, Family::keeping(owner))
    }

    /// Checks that the driver and NCCL are installed.
    ///
    /// # Errors
    /// Returns [`CommunicatorError::Missing`](crate::CommunicatorError::Missing) if one of them is not.
    pub fn is_available() -> Result<()> {
        Library::load().map(drop)
    }

    /// Like [`Self::on_device`], with an existing compute stream, which also determines the GPU.
    ///
    /// # Errors
    /// Returns an error in the same cases as [`Self::on_device`].
    pub fn over(control: Box<dyn Communicator>, compute: &Arc<CudaStream>) -> Result<Self> {
        Self::of_all(control, compute, Family::default())
    }

    fn of_all(control: Box<dyn Communicator>, compute: &Arc<CudaStream>, family: Family) -> Result<Self> {
        let members = (0..control.size()).collect();
        Self::join(control, members, compute, Arc::new(family), crate::default_timeout()?)
    }

    pub(super) fn join(
        mut control: Box<dyn Communicator>,
        members: Arc<[usize]>,
        compute: &Arc<CudaStream>,
        family: Arc<Family>,
        timeout: Duration,
    ) -> Result<Self> {
        let library = Library::load()?;
        let (stream, scratch, comm) = match parts(library, &mut *control, compute) {
            Ok(parts) => parts,
            Err(error) => {
                control.abort(&error.to_string());
                return Err(error);
            }
        };
        let (comm, scratch_address) = (Arc::new(comm), scratch.device_ptr(&stream).0);
        family.add(&comm);
        let mut this = Self {
            control,
            owner: Owner::unique(),
            members,
            comm,
            family,
            compute: compute.clone(),
            stream,
            scratch: (scratch, scratch_address),
            slots: Vec::new(),
            left: VecDeque::new(),
            run: None,
            started: Vec::new(),
            sums: Sums::default(),
            timeout,
            failure: None,
        };
        this.until(|_| all("NCCL's set-up"), |_| Ok(true))?;
        // Performs the first exchange between all ranks.
        this.barrier()?;
        Ok(this)
    }

    /// Performs the first exchange of messages with some ranks. These must call it too, with this rank among their
    /// peers.
    pub(super) fn greet(&mut self, peers: &BTreeSet<usize>) -> Result<()> {
        let size = size_of::<f32>();
        let word = |index: usize| (self.scratch.1 + (size * index) as u64) as *mut u8;
        let stream = self.stream.cu_stream().cast();
        let called = self.comm.group(|| {
            peers.iter().try_for_each(|&peer| {
                // SAFETY: the scratch has a word to send, and a word to receive from each rank.
                unsafe {
                    self.comm.send(word(0), size, peer, stream)?;
                    self.comm.receive(word(1 + peer), size, peer, stream)
                }
            })
        });
        called.map_err(|error| self.fail(error))?;
        self.until(|_| all("first messages over NCCL"), |_| Ok(true))
    }
}

/// Creates the rank's own resources: a stream, scratch memory, and its end of an NCCL communicator.
fn parts(
    library: &'static Library,
    control: &mut dyn Communicator,
    compute: &CudaStream,
) -> Result<(Arc<CudaStream>, CudaSlice<f32>, Comm)> {
    let context = compute.context();
    context.bind_to_thread().map_err(cuda("cuCtxSetCurrent"))?;
    let stream = context.new_stream().map_err(cuda("cuStreamCreate"))?;
    let scratch = stream.alloc_zeros(1 + control.size()).map_err(cuda("cuMemAlloc"))?;
    let mut id = if control.rank() == 0 { raw::unique_id(library)? } else { [0; ID_BYTES] };
    control.broadcast(&mut id, 0)?;
    Ok((stream, scratch, Comm::join(library, id, control.rank(), control.size())?))
}
