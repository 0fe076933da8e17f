//! How a rank joins the others over NCCL.

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
    /// This rank of `control`'s ranks, on a GPU by its number in this process, with a new stream for its computations. A
    /// collective operation.
    ///
    /// # Errors
    /// [`CommunicatorError::Missing`](crate::CommunicatorError::Missing) without driver or NCCL, before anything else. What NCCL refuses, such as two ranks on
    /// one GPU. Whoever gets an error leaves, and the others' calls fail.
    pub fn on_device(control: Box<dyn Communicator>, ordinal: usize) -> Result<Self> {
        Library::load()?;
        let context = CudaContext::new(ordinal).map_err(cuda("cuDevicePrimaryCtxRetain"))?;
        let compute = context.new_stream().map_err(cuda("cuStreamCreate"))?;
        Self::over(control, &compute)
    }

    /// As [`Self::on_device`], with the computations of a stream of that GPU's primary context, which `owner` keeps alive.
    ///
    /// # Safety
    /// The stream is one, and stays as long as its owner.
    ///
    /// # Errors
    /// As [`Self::on_device`].
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

    /// Expects driver and NCCL.
    ///
    /// # Errors
    /// [`CommunicatorError::Missing`](crate::CommunicatorError::Missing).
    pub fn is_available() -> Result<()> {
        Library::load().map(drop)
    }

    /// As [`Self::on_device`], with the GPU and the computations of a stream that there is already.
    ///
    /// # Errors
    /// As [`Self::on_device`].
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
        // The first time that all ranks exchange something.
        this.barrier()?;
        Ok(this)
    }

    /// Gets the first message over with to and from some ranks, which do the same.
    pub(super) fn greet(&mut self, peers: &BTreeSet<usize>) -> Result<()> {
        let size = size_of::<f32>();
        let word = |index: usize| (self.scratch.1 + (size * index) as u64) as *mut u8;
        let stream = self.stream.cu_stream().cast();
        let called = self.comm.group(|| {
            peers.iter().try_for_each(|&peer| {
                // SAFETY: the scratch has a word to send, and one from each rank.
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

/// What a rank needs of its own: a stream, scratch, and its end of a communicator of NCCL's.
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
