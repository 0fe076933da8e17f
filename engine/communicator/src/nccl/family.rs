//! The communicators of one rank, which fail together.
//!
//! An operation of one communicator may wait for the rank's computation, which may wait for an operation of another
//! communicator. So after a failure, a stream ends only once all communicators have been aborted.

use std::any::Any;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use super::raw::Comm;
use crate::Result;

/// A communicator and all communicators that were split from it.
#[derive(Default)]
pub(super) struct Family {
    comms: Mutex<Vec<Weak<Comm>>>,
    /// The owner of the compute stream, which must stay alive.
    _owner: Option<Arc<dyn Any + Send + Sync>>,
}

impl Family {
    /// Creates a family that keeps `owner` alive.
    pub(super) fn keeping(owner: Arc<dyn Any + Send + Sync>) -> Self {
        Self { comms: Mutex::default(), _owner: Some(owner) }
    }

    pub(super) fn add(&self, comm: &Arc<Comm>) {
        let mut members = self.comms.lock().unwrap_or_else(PoisonError::into_inner);
        members.retain(|member| member.strong_count() > 0);
        members.push(Arc::downgrade(comm));
    }

    fn members(&self) -> Vec<Arc<Comm>> {
        self.comms.lock().unwrap_or_else(PoisonError::into_inner).iter().filter_map(Weak::upgrade).collect()
    }

    /// Returns an error if any of the communicators has failed.
    pub(super) fn check(&self) -> Result<()> {
        self.members().iter().try_for_each(|member| member.is_call_complete().map(drop))
    }

    /// Aborts all communicators, concurrently, because the abort of one may wait for an operation of another.
    pub(super) fn abort(&self) {
        let members = self.members();
        std::thread::scope(|scope| {
            for member in &members {
                scope.spawn(|| member.abort());
            }
        });
    }
}
