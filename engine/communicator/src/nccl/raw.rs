//! The few NCCL calls that the backend makes, with errors as values.
//!
//! Communicators are non-blocking: a call may return before it has finished its communication with other ranks. The
//! communicator must not be used again until [`Comm::is_call_complete`] returns true.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::sync::{Mutex, MutexGuard, PoisonError};

use cudarc::nccl::sys::{ncclComm_t, ncclConfig_t, ncclUniqueId};

use super::library::{Functions, Library, OLDEST, Stream};
use crate::{CommunicatorError, Result};

/// Bytes of the id of a communicator.
pub(super) const ID_BYTES: usize = 128;

// Constants of NCCL's header.
const SUCCESS: c_int = 0;
const IN_PROGRESS: c_int = 7;
const UINT8: c_int = 1;
const FLOAT32: c_int = 7;
const SUM: c_int = 0;
const MAGIC: c_uint = 0xcafe_beef;
const UNDEFINED: c_int = c_int::MIN;

/// One rank's end of a communicator.
pub(super) struct Comm {
    nccl: &'static Functions,
    handle: Mutex<Handle>,
}

/// A communicator; null once it was destroyed or aborted.
struct Handle(ncclComm_t);

// SAFETY: NCCL accepts calls on a communicator from any thread, but only one at a time. The lock ensures that.
unsafe impl Send for Handle {}

/// Creates an id for a new communicator. All ranks of the communicator must join with the same id.
pub(super) fn unique_id(library: &'static Library) -> Result<[u8; ID_BYTES]> {
    let mut id = ncclUniqueId { internal: [0; ID_BYTES] };
    // SAFETY: `id` outlives the call.
    let code = unsafe { (library.functions.get_unique_id)(&mut id) };
    checked(&library.functions, "ncclGetUniqueId", code, std::ptr::null_mut())?;
    Ok(id.internal.map(|byte| byte as u8))
}

impl Comm {
    /// Begins to join the communicator with this id, on the thread's current device.
    pub(super) fn join(library: &'static Library, id: [u8; ID_BYTES], rank: usize, size: usize) -> Result<Self> {
        let nccl = &library.functions;
        let count = |number: usize| c_int::try_from(number).map_err(|_| too_many(size));
        let id = ncclUniqueId { internal: id.map(|byte| byte as c_char) };
        let mut config = ncclConfig_t {
            size: size_of::<ncclConfig_t>(),
            magic: MAGIC,
            version: OLDEST as c_uint,
            blocking: 0,
            cgaClusterSize: UNDEFINED,
            minCTAs: UNDEFINED,
            maxCTAs: UNDEFINED,
            netName: std::ptr::null(),
            splitShare: UNDEFINED,
        };
        let mut handle = std::ptr::null_mut();
        // SAFETY: `handle` and `config` outlive the call.
        let code = unsafe { (nccl.init)(&mut handle, count(size)?, id, count(rank)?, &mut config) };
        let joined = Self { nccl, handle: Mutex::new(Handle(handle)) };
        checked(nccl, "ncclCommInitRankConfig", code, handle)?;
        Ok(joined)
    }

    /// Makes a call, unless the communicator was aborted or destroyed.
    fn call(&self, name: &'static str, call: impl FnOnce(&Functions, ncclComm_t) -> c_int) -> Result<()> {
        let held = self.lock();
        let handle = held.0;
        if handle.is_null() {
            return Err(CommunicatorError::Nccl { call: name, what: "the communicator was aborted".into() });
        }
        checked(self.nccl, name, call(self.nccl, handle), handle)
    }

    fn lock(&self) -> MutexGuard<'_, Handle> {
        self.handle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// True if all calls have completed. Launched operations may still be running.
    ///
    /// # Errors
    /// Returns an error if the communicator has failed.
    pub(super) fn is_call_complete(&self) -> Result<bool> {
        const CALL: &str = "ncclCommGetAsyncError";
        let mut state = SUCCESS;
        // SAFETY: the handle is a valid communicator; `state` outlives the call.
        self.call(CALL, |nccl, handle| unsafe { (nccl.state)(handle, &mut state) })?;
        self.call(CALL, |_, _| state)?;
        Ok(state == SUCCESS)
    }

    /// # Safety
    /// This applies to the following methods too. Addresses must be valid on the communicator's device for the given
    /// size, and must stay lent until the stream has executed the call. The stream must belong to that device.
    pub(super) unsafe fn send(&self, bytes: *const u8, len: usize, to: usize, stream: Stream) -> Result<()> {
        // SAFETY: by this function's contract. The number of ranks was checked to fit `c_int` on joining.
        self.call("ncclSend", |nccl, handle| unsafe {
            (nccl.send)(bytes.cast(), len, UINT8, to as c_int, handle, stream)
        })
    }

    /// # Safety
    /// As for [`Self::send`].
    pub(super) unsafe fn receive(&self, bytes: *mut u8, len: usize, from: usize, stream: Stream) -> Result<()> {
        // SAFETY: by this function's contract.
        self.call("ncclRecv", |nccl, handle| unsafe {
            (nccl.receive)(bytes.cast(), len, UINT8, from as c_int, handle, stream)
        })
    }

    /// # Safety
    /// As for [`Self::send`].
    pub(super) unsafe fn all_reduce(&self, values: *mut f32, count: usize, stream: Stream) -> Result<()> {
        let values: *mut c_void = values.cast();
        // SAFETY: by this function's contract.
        self.call("ncclAllReduce", |nccl, handle| unsafe {
            (nccl.all_reduce)(values, values, count, FLOAT32, SUM, handle, stream)
        })
    }

    /// # Safety
    /// The requirements of [`Self::send`] apply; `count` is the number of elements of a part.
    pub(super) unsafe fn reduce_scatter(
        &self,
        send: *const f32,
        receive: *mut f32,
        count: usize,
        stream: Stream,
    ) -> Result<()> {
        let (send, receive) = (send.cast(), receive.cast());
        // SAFETY: by this function's contract.
        self.call("ncclReduceScatter", |nccl, handle| unsafe {
            (nccl.reduce_scatter)(send, receive, count, FLOAT32, SUM, handle, stream)
        })
    }

    /// # Safety
    /// The requirements of [`Self::send`] apply; `len` is the size of a part in bytes.
    pub(super) unsafe fn all_gather(
        &self,
        send: *const u8,
        receive: *mut u8,
        len: usize,
        stream: Stream,
    ) -> Result<()> {
        // SAFETY: by this function's contract.
        self.call("ncclAllGather", |nccl, handle| unsafe {
            (nccl.all_gather)(send.cast(), receive.cast(), len, UINT8, handle, stream)
        })
    }

    /// # Safety
    /// As for [`Self::send`].
    pub(super) unsafe fn broadcast(&self, bytes: *mut u8, len: usize, root: usize, stream: Stream) -> Result<()> {
        let bytes: *mut c_void = bytes.cast();
        // SAFETY: by this function's contract.
        self.call("ncclBroadcast", |nccl, handle| unsafe {
            (nccl.broadcast)(bytes, bytes, len, UINT8, root as c_int, handle, stream)
        })
    }

    /// Runs `calls`, and launches the operations that it requests as one group. No operation of a group waits for
    /// another one of that group.
    pub(super) fn group(&self, calls: impl FnOnce() -> Result<()>) -> Result<()> {
        // SAFETY: every group that is started is ended.
        self.call("ncclGroupStart", |nccl, _| unsafe { (nccl.group_start)() })?;
        let called = calls();
        // SAFETY: as above.
        called.and(self.call("ncclGroupEnd", |nccl, _| unsafe { (nccl.group_end)() }))
    }

    /// Starts the shutdown of the communicator, in which all ranks must take part.
    pub(super) fn finalize(&self) -> Result<()> {
        // SAFETY: the handle is a valid communicator.
        self.call("ncclCommFinalize", |nccl, handle| unsafe { (nccl.finalize)(handle) })
    }

    /// Frees a finalized communicator.
    pub(super) fn destroy(&self) -> Result<()> {
        let handle = self.take();
        if handle.is_null() {
            return Ok(());
        }
        // SAFETY: the handle is a valid communicator, and was removed, so it is not used again.
        let code = unsafe { (self.nccl.destroy)(handle) };
        checked(self.nccl, "ncclCommDestroy", code, std::ptr::null_mut())
    }

    fn take(&self) -> ncclComm_t {
        std::mem::replace(&mut *self.lock(), Handle(std::ptr::null_mut())).0
    }

    /// Ends all running operations, without the other ranks. A second call does nothing.
    pub(super) fn abort(&self) {
        let handle = self.take();
        if !handle.is_null() {
            // SAFETY: the handle is a valid communicator, and was removed, so it is not used again. An error is
            // ignored, because the caller could not react to it.
            unsafe { (self.nccl.abort)(handle) };
        }
    }
}

impl Drop for Comm {
    fn drop(&mut self) {
        self.abort();
    }
}

/// Turns a result code of NCCL into an error. Success and a call in progress are not errors.
fn checked(nccl: &Functions, call: &'static str, code: c_int, comm: ncclComm_t) -> Result<()> {
    match code {
        SUCCESS | IN_PROGRESS => Ok(()),
        code => Err(CommunicatorError::Nccl { call, what: nccl.text(code, comm) }),
    }
}

fn too_many(size: usize) -> CommunicatorError {
    CommunicatorError::Nccl { call: "ncclCommInitRankConfig", what: format!("{size} ranks are too many") }
}

#[cfg(test)]
mod tests {
    use cudarc::nccl::sys;

    use super::*;

    #[test]
    fn the_headers_numbers_are_those_of_its_bindings() {
        assert_eq!(SUCCESS, sys::ncclResult_t::ncclSuccess as c_int);
        assert_eq!(IN_PROGRESS, sys::ncclResult_t::ncclInProgress as c_int);
        assert_eq!(UINT8, sys::ncclDataType_t::ncclUint8 as c_int);
        assert_eq!(FLOAT32, sys::ncclDataType_t::ncclFloat32 as c_int);
        assert_eq!(SUM, sys::ncclRedOp_t::ncclSum as c_int);
        assert_eq!(ID_BYTES, size_of::<ncclUniqueId>());
    }
}
