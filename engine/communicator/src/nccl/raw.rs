//! The few calls of NCCL that the backend makes, with errors as values.
//!
//! Communicators do not block: a call may return before it is through with what it has to say to other ranks, and nothing
//! else may be asked of the communicator until [`Comm::is_settled`] says so.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::sync::{Mutex, MutexGuard, PoisonError};

use cudarc::nccl::sys::{ncclComm_t, ncclConfig_t, ncclUniqueId};

use super::library::{Functions, Library, OLDEST, Stream};
use crate::{CommunicatorError, Result};

/// Bytes that say which communicator a rank belongs to.
pub(super) const ID_BYTES: usize = 128;

// Of NCCL's header.
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

/// Null once it was destroyed or aborted.
struct Handle(ncclComm_t);

// SAFETY: NCCL takes a communicator's calls from any thread, one at a time, which the lock sees to.
unsafe impl Send for Handle {}

/// What a new communicator is to be called by all its ranks.
pub(super) fn unique_id(library: &'static Library) -> Result<[u8; ID_BYTES]> {
    let mut id = ncclUniqueId { internal: [0; ID_BYTES] };
    // SAFETY: the result outlives the call.
    let code = unsafe { (library.functions.get_unique_id)(&mut id) };
    checked(&library.functions, "ncclGetUniqueId", code, std::ptr::null_mut())?;
    Ok(id.internal.map(|byte| byte as u8))
}

impl Comm {
    /// Begins to join a communicator, on the thread's current device.
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
        // SAFETY: result and configuration outlive the call.
        let code = unsafe { (nccl.init)(&mut handle, count(size)?, id, count(rank)?, &mut config) };
        let joined = Self { nccl, handle: Mutex::new(Handle(handle)) };
        checked(nccl, "ncclCommInitRankConfig", code, handle)?;
        Ok(joined)
    }

    /// Makes a call, unless the communicator was aborted.
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

    /// Whether all that was called is through. What was launched may still be running.
    ///
    /// # Errors
    /// What has happened to the communicator since.
    pub(super) fn is_settled(&self) -> Result<bool> {
        const CALL: &str = "ncclCommGetAsyncError";
        let mut state = SUCCESS;
        // SAFETY: the handle is a communicator's; the result outlives the call.
        self.call(CALL, |nccl, handle| unsafe { (nccl.state)(handle, &mut state) })?;
        self.call(CALL, |_, _| state)?;
        Ok(state == SUCCESS)
    }

    /// # Safety
    /// Here and below: addresses are valid on the communicator's device for what they are called, and lent until the stream
    /// has come past the call. The stream is one of that device.
    pub(super) unsafe fn send(&self, bytes: *const u8, len: usize, to: usize, stream: Stream) -> Result<()> {
        // SAFETY: the caller's promise. Ranks were counted as `c_int` when the communicator was joined.
        self.call("ncclSend", |nccl, handle| unsafe {
            (nccl.send)(bytes.cast(), len, UINT8, to as c_int, handle, stream)
        })
    }

    /// # Safety
    /// As [`Self::send`].
    pub(super) unsafe fn receive(&self, bytes: *mut u8, len: usize, from: usize, stream: Stream) -> Result<()> {
        // SAFETY: the caller's promise.
        self.call("ncclRecv", |nccl, handle| unsafe {
            (nccl.receive)(bytes.cast(), len, UINT8, from as c_int, handle, stream)
        })
    }

    /// # Safety
    /// As [`Self::send`].
    pub(super) unsafe fn all_reduce(&self, values: *mut f32, count: usize, stream: Stream) -> Result<()> {
        let values: *mut c_void = values.cast();
        // SAFETY: the caller's promise.
        self.call("ncclAllReduce", |nccl, handle| unsafe {
            (nccl.all_reduce)(values, values, count, FLOAT32, SUM, handle, stream)
        })
    }

    /// # Safety
    /// As [`Self::send`]. `count` is that of a part.
    pub(super) unsafe fn reduce_scatter(
        &self,
        send: *const f32,
        receive: *mut f32,
        count: usize,
        stream: Stream,
    ) -> Result<()> {
        let (send, receive) = (send.cast(), receive.cast());
        // SAFETY: the caller's promise.
        self.call("ncclReduceScatter", |nccl, handle| unsafe {
            (nccl.reduce_scatter)(send, receive, count, FLOAT32, SUM, handle, stream)
        })
    }

    /// # Safety
    /// As [`Self::send`]. `len` is that of a part.
    pub(super) unsafe fn all_gather(
        &self,
        send: *const u8,
        receive: *mut u8,
        len: usize,
        stream: Stream,
    ) -> Result<()> {
        // SAFETY: the caller's promise.
        self.call("ncclAllGather", |nccl, handle| unsafe {
            (nccl.all_gather)(send.cast(), receive.cast(), len, UINT8, handle, stream)
        })
    }

    /// # Safety
    /// As [`Self::send`].
    pub(super) unsafe fn broadcast(&self, bytes: *mut u8, len: usize, root: usize, stream: Stream) -> Result<()> {
        let bytes: *mut c_void = bytes.cast();
        // SAFETY: the caller's promise.
        self.call("ncclBroadcast", |nccl, handle| unsafe {
            (nccl.broadcast)(bytes, bytes, len, UINT8, root as c_int, handle, stream)
        })
    }

    /// Launches what `calls` asks for as one: none of it waits for another part of it.
    pub(super) fn group(&self, calls: impl FnOnce() -> Result<()>) -> Result<()> {
        // SAFETY: every group that is started is ended.
        self.call("ncclGroupStart", |nccl, _| unsafe { (nccl.group_start)() })?;
        let called = calls();
        // SAFETY: as above.
        called.and(self.call("ncclGroupEnd", |nccl, _| unsafe { (nccl.group_end)() }))
    }

    /// Begins to leave in order, which takes all ranks.
    pub(super) fn finalize(&self) -> Result<()> {
        // SAFETY: the handle is a communicator's.
        self.call("ncclCommFinalize", |nccl, handle| unsafe { (nccl.finalize)(handle) })
    }

    /// Frees what was finalized.
    pub(super) fn destroy(&self) -> Result<()> {
        let handle = self.take();
        if handle.is_null() {
            return Ok(());
        }
        // SAFETY: the handle is a communicator's, and nobody has it any more.
        let code = unsafe { (self.nccl.destroy)(handle) };
        checked(self.nccl, "ncclCommDestroy", code, std::ptr::null_mut())
    }

    fn take(&self) -> ncclComm_t {
        std::mem::replace(&mut *self.lock(), Handle(std::ptr::null_mut())).0
    }

    /// Ends all that is running, without asking the others. Does nothing the second time.
    pub(super) fn abort(&self) {
        let handle = self.take();
        if !handle.is_null() {
            // SAFETY: the handle is a communicator's, and nobody has it any more. Its result says nothing that could be
            // acted on.
            unsafe { (self.nccl.abort)(handle) };
        }
    }
}

impl Drop for Comm {
    fn drop(&mut self) {
        self.abort();
    }
}

/// A code as an error. That a call is not through yet is none.
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
