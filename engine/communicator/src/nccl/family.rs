//! The communicators of one rank, which fail together.
//!
//! What one has launched may wait for what the rank computes, and that for another one's messages. So when one fails, a stream ends
//! only after all were aborted.

use std::any::Any;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use super::raw::Comm;
use crate::Result;

/// All communicators that were split from one, with that one.
#[derive(Default)]
pub(super) struct Family {
    comms: Mutex<Vec<Weak<Comm>>>,
    /// What the stream that computes belongs to.
    _owner: Option<Arc<dyn Any + Send + Sync>>,
}

impl Family {
    /// Keeps something alive as long as one of them.
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

    /// What has happened to one of them.
    pub(super) fn check(&self) -> Result<()> {
        self.members().iter().try_for_each(|member| member.is_settled().map(drop))
    }

    /// Aborts all, side by side: NCCL may wait in one for what another has running.
    pub(super) fn abort(&self) {
        let members = self.members();
        std::thread::scope(|scope| {
            for member in &members {
                scope.spawn(|| member.abort());
            }
        });
    }
}
