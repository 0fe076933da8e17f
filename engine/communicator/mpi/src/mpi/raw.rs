//! The few MPI calls that the backend makes, with errors as values. Only the thread that started MPI may call them.

use std::ffi::c_int;

use gapless_communicator::{CommunicatorError, Result};
use mpi::ffi;

pub(super) use mpi::ffi::{MPI_Comm as Comm, MPI_Request as Request, MPI_Status as Status};

/// The most bytes of one MPI message. MPI counts in `i32`, so longer messages are sent in pieces of this size.
pub(super) const LARGEST: usize = 1 << 30;

/// Returns the communicator of all processes, configured to return errors instead of ending the process.
pub(super) fn world() -> Result<Comm> {
    // SAFETY: MPI was started by this thread.
    returning_errors(unsafe { ffi::RSMPI_COMM_WORLD })
}

fn returning_errors(comm: Comm) -> Result<Comm> {
    // SAFETY: MPI was started by this thread.
    let code = unsafe { ffi::MPI_Comm_set_errhandler(comm, ffi::RSMPI_ERRORS_RETURN) };
    checked("MPI_Comm_set_errhandler", code).map(|()| comm)
}

/// Returns this process's rank in a communicator, and the communicator's size.
pub(super) fn place(comm: Comm) -> Result<(usize, usize)> {
    let (mut rank, mut size) = (0, 0);
    // SAFETY: MPI was started by this thread; the results outlive the calls.
    unsafe {
        checked("MPI_Comm_rank", ffi::MPI_Comm_rank(comm, &mut rank))?;
        checked("MPI_Comm_size", ffi::MPI_Comm_size(comm, &mut size))?;
    }
    Ok((rank as usize, size as usize))
}

/// Returns the largest tag that MPI allows.
pub(super) fn largest_tag(comm: Comm) -> Result<u64> {
    let mut value: *mut c_int = std::ptr::null_mut();
    let mut set = 0;
    // SAFETY: MPI was started by this thread. The attribute's value is the address of an int that MPI owns.
    unsafe {
        let (tag_ub, value) = (ffi::MPI_TAG_UB as c_int, (&raw mut value).cast());
        checked("MPI_Comm_get_attr", ffi::MPI_Comm_get_attr(comm, tag_ub, value, &mut set))?;
    }
    // SAFETY: as above. If MPI gives no value, tags up to 32767 are allowed, which the standard guarantees.
    Ok(if set != 0 && !value.is_null() { unsafe { *value as u64 } } else { 32_767 })
}

/// Splits a communicator and returns the one for this rank's color. Blocks until all ranks have called this function.
pub(super) fn split(comm: Comm, color: usize, key: usize) -> Result<Comm> {
    // SAFETY: MPI was started by this thread; the result outlives the call.
    unsafe {
        let mut part = ffi::RSMPI_COMM_NULL;
        checked("MPI_Comm_split", ffi::MPI_Comm_split(comm, color as c_int, key as c_int, &mut part))?;
        returning_errors(part)
    }
}

/// Creates a communicator of the same ranks whose messages are separate. Blocks until all ranks have called this
/// function.
pub(super) fn duplicate(comm: Comm) -> Result<Comm> {
    // SAFETY: MPI was started by this thread; the result outlives the call.
    unsafe {
        let mut copy = ffi::RSMPI_COMM_NULL;
        checked("MPI_Comm_dup", ffi::MPI_Comm_dup(comm, &mut copy))?;
        returning_errors(copy)
    }
}

/// Ends all processes.
pub(super) fn abort() -> ! {
    // SAFETY: MPI was started by this thread, and is not called afterwards.
    unsafe { ffi::MPI_Abort(ffi::RSMPI_COMM_WORLD, 1) };
    std::process::abort()
}

/// Starts to send at most [`LARGEST`] bytes.
///
/// # Safety
/// The bytes must be valid for reads, and must not be written until the request has ended.
pub(super) unsafe fn isend(comm: Comm, bytes: *const u8, len: usize, to: usize, tag: i32) -> Result<Request> {
    // SAFETY: by this function's contract; MPI was started by this thread.
    unsafe {
        let mut request = ffi::RSMPI_REQUEST_NULL;
        let (kind, to) = (ffi::RSMPI_UINT8_T, to as c_int);
        let code = ffi::MPI_Isend(bytes.cast(), len as c_int, kind, to, tag, comm, &mut request);
        checked("MPI_Isend", code)?;
        Ok(request)
    }
}

/// Starts to receive at most [`LARGEST`] bytes.
///
/// # Safety
/// The bytes must be valid for writes, and must not be accessed until the request has ended.
pub(super) unsafe fn irecv(comm: Comm, bytes: *mut u8, len: usize, from: usize, tag: i32) -> Result<Request> {
    // SAFETY: by this function's contract; MPI was started by this thread.
    unsafe {
        let mut request = ffi::RSMPI_REQUEST_NULL;
        let (kind, from) = (ffi::RSMPI_UINT8_T, from as c_int);
        let code = ffi::MPI_Irecv(bytes.cast(), len as c_int, kind, from, tag, comm, &mut request);
        checked("MPI_Irecv", code)?;
        Ok(request)
    }
}

/// The state of a request.
pub(super) enum Outcome {
    UnderWay,
    /// The request has ended. The value is the number of bytes received; for a send, it has no meaning.
    Ended(usize),
    /// More bytes arrived than expected. The value is the number of bytes that arrived, as far as MPI reports it.
    Truncated(usize),
}

/// Checks whether a request has ended. MPI makes progress during this call.
pub(super) fn test(request: &mut Request) -> Result<Outcome> {
    // SAFETY: MPI was started by this thread; the status is plain data that MPI fills.
    unsafe {
        let (mut ended, mut status) = (0, std::mem::zeroed::<Status>());
        let code = ffi::MPI_Test(request, &mut ended, &mut status);
        let mut count = 0;
        if code != ffi::MPI_SUCCESS as c_int {
            let mut class = 0;
            ffi::MPI_Error_class(code, &mut class);
            if class != ffi::MPI_ERR_TRUNCATE as c_int {
                return checked("MPI_Test", code).map(|()| Outcome::UnderWay);
            }
            ffi::MPI_Get_count(&status, ffi::RSMPI_UINT8_T, &mut count);
            return Ok(Outcome::Truncated(count.max(0) as usize));
        }
        if ended == 0 {
            return Ok(Outcome::UnderWay);
        }
        checked("MPI_Get_count", ffi::MPI_Get_count(&status, ffi::RSMPI_UINT8_T, &mut count))?;
        Ok(Outcome::Ended(count.max(0) as usize))
    }
}

/// Turns a result code of MPI into an error, unless it means success.
fn checked(call: &'static str, code: c_int) -> Result<()> {
    if code == ffi::MPI_SUCCESS as c_int {
        return Ok(());
    }
    let mut text = [0u8; ffi::MPI_MAX_ERROR_STRING as usize + 1];
    let mut len = 0;
    // SAFETY: MPI was started by this thread; the text is as long as MPI may need.
    unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr().cast(), &mut len) };
    let what = String::from_utf8_lossy(&text[..(len.max(0) as usize).min(text.len())]).into_owned();
    Err(CommunicatorError::Mpi { call, what })
}
