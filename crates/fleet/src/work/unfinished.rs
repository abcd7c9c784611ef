//! A Body that is removed unless its caller finishes it: the work that creates Bodies can be cancelled at any time.

use std::{
    pin::pin,
    task::{Context, Waker},
};

use proto::{BodyId, Failure};

use crate::{BodyView, Create, Discard, Fleet, Force, blocking::run_blocking};

/// A Body of which nobody outside knows yet. Dropping it removes the Body, so that a cancelled request leaves none.
#[derive(Debug)]
pub(crate) struct UnfinishedBody<'a> {
    fleet: &'a Fleet,
    view: Option<BodyView>,
}

impl<'a> UnfinishedBody<'a> {
    /// Creates a Body, and waits until the commands of its start have run.
    pub async fn create(fleet: &'a Fleet, request: Create) -> Result<Self, Failure> {
        let view = run_blocking(|| fleet.creator().create_now(request, None))?;
        let body = Self { fleet, view: Some(view.clone()) };
        match fleet.creator().await_template_start(view).await {
            Ok(_) => Ok(body),
            Err(failure) => {
                let _ = body.remove().await;
                Err(failure)
            }
        }
    }

    /// The id of the Body.
    pub fn id(&self) -> Result<&BodyId, Failure> {
        self.view().map(BodyView::id)
    }

    /// The view of the Body.
    pub fn view(&self) -> Result<&BodyView, Failure> {
        self.view.as_ref().ok_or_else(|| Failure::new(proto::Kind::Internal, "the Body is finished already"))
    }

    /// Gives the Body to the caller.
    pub fn finish(mut self) -> Result<BodyView, Failure> {
        let view = self.view()?.clone();
        self.view = None;
        Ok(view)
    }

    /// Removes the Body.
    pub async fn remove(mut self) -> Result<(), Failure> {
        match self.view.take() {
            Some(view) => self.fleet.remove_with(view.id(), Force::Yes, Discard::Yes).await,
            None => Ok(()),
        }
    }
}

impl Drop for UnfinishedBody<'_> {
    fn drop(&mut self) {
        let Some(view) = self.view.take() else { return };
        // A removal blocks and never waits, so one poll completes it.
        let removal = pin!(self.fleet.remove_with(view.id(), Force::Yes, Discard::Yes));
        let _ = removal.poll(&mut Context::from_waker(Waker::noop()));
    }
}
