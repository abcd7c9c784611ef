//! Bodies on inspected connections: they stream through, and values of secrets are put in or masked on the way.

use std::{
    cell::RefCell,
    error::Error,
    pin::Pin,
    rc::Rc,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::Bytes;
use http_body_util::{BodyExt, Limited};
use hyper::{
    HeaderMap,
    body::{Body, Frame, Incoming, SizeHint},
};
use tokio::time::timeout;

use super::mask::Mask;
use crate::{
    budgets::Meter,
    secrets::{OpenSecret, replace_all},
};

/// How much of the body of a refused request is read, and for how long.
const DRAINED_LEN_MAX: usize = 64 << 10;
const DRAIN_PATIENCE: Duration = Duration::from_secs(1);

pub type BodyError = Box<dyn Error + Send + Sync>;
/// A body of any source.
pub type AnyBody = Pin<Box<dyn Body<Data = Bytes, Error = BodyError>>>;

/// The body of a request, of which the session keeps a handle: after a refusal it reads what the program still sends,
/// because programs that cannot send the rest report that and not the reason.
#[derive(Clone)]
pub struct DrainableBody(Rc<RefCell<Incoming>>);

impl DrainableBody {
    /// Shares a body.
    pub fn new(body: Incoming) -> Self {
        Self(Rc::new(RefCell::new(body)))
    }

    /// Reads the rest of a short body, for a moment.
    pub async fn drain(self) {
        let _ = timeout(DRAIN_PATIENCE, Limited::new(self, DRAINED_LEN_MAX).collect()).await;
    }
}

impl Body for DrainableBody {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        Pin::new(&mut *self.0.borrow_mut()).poll_frame(context).map_err(Into::into)
    }

    fn is_end_stream(&self) -> bool {
        self.0.borrow().is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.0.borrow().size_hint()
    }
}

/// Changes the bytes of a body, of which a part may be held back until more are there.
pub trait Rewrite {
    /// Rewrites the bytes that may go on, and leaves the others in `held`.
    fn rewrite(&self, held: &mut Vec<u8>, is_last: bool) -> Vec<u8>;
    /// Whether each byte becomes one byte.
    fn keeps_length(&self) -> bool;
}

impl Rewrite for Mask {
    fn rewrite(&self, held: &mut Vec<u8>, is_last: bool) -> Vec<u8> {
        self.apply(held);
        let kept = if is_last { 0 } else { self.hold_back(held) };
        let rest = held.split_off(held.len() - kept);
        std::mem::replace(held, rest)
    }

    fn keeps_length(&self) -> bool {
        true
    }
}

/// A body whose bytes are counted.
pub struct MeteredBody<B> {
    inner: B,
    meter: Rc<Meter>,
}

impl<B> MeteredBody<B> {
    pub fn new(inner: B, meter: Rc<Meter>) -> Self {
        Self { inner, meter }
    }
}

impl<B> Body for MeteredBody<B>
where
    B: Body<Data = Bytes, Error = BodyError> + Unpin,
{
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let body = self.get_mut();
        let frame = ready!(Pin::new(&mut body.inner).poll_frame(context)).transpose()?;
        let Some(frame) = frame else { return Poll::Ready(None) };
        let len = match (frame.data_ref(), frame.trailers_ref()) {
            (Some(data), _) => data.len(),
            (None, Some(trailers)) => headers_len(trailers),
            (None, None) => 0,
        };
        body.meter.spend(len)?;
        Poll::Ready(Some(Ok(frame)))
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

/// How many bytes headers take, about.
pub fn headers_len(headers: &HeaderMap) -> usize {
    headers.iter().map(|(name, value)| name.as_str().len() + value.len() + 4).sum()
}

/// Placeholders, each with its value.
pub struct Replacements(Vec<(Rc<OpenSecret>, Vec<u8>)>);

impl Replacements {
    pub fn new(values: Vec<(Rc<OpenSecret>, Vec<u8>)>) -> Self {
        Self(values)
    }
}

impl Rewrite for Replacements {
    fn rewrite(&self, held: &mut Vec<u8>, is_last: bool) -> Vec<u8> {
        let placeholders = || self.0.iter().map(|(secret, _)| secret.placeholder.as_bytes());
        let is_beginning = |len: &usize| {
            placeholders().any(|placeholder| {
                placeholder.len() > *len && placeholder.starts_with(&held[held.len() - len..])
            })
        };
        let longest = placeholders().map(<[u8]>::len).max().unwrap_or(0);
        let kept = match is_last {
            true => 0,
            false => (1..longest.min(held.len() + 1)).rev().find(is_beginning).unwrap_or(0),
        };
        let rest = held.split_off(held.len() - kept);
        let ready = std::mem::replace(held, rest);
        self.0
            .iter()
            .fold(ready, |text, (secret, value)| replace_all(&text, secret.placeholder.as_bytes(), value))
    }

    fn keeps_length(&self) -> bool {
        false
    }
}

/// A body whose bytes are rewritten as they go through.
pub struct RewrittenBody<B, R> {
    inner: B,
    rewrite: R,
    held: Vec<u8>,
    /// The frame behind the last bytes: trailers.
    behind: Option<Frame<Bytes>>,
    is_done: bool,
}

impl<B, R> RewrittenBody<B, R> {
    pub fn new(inner: B, rewrite: R) -> Self {
        Self { inner, rewrite, held: Vec::new(), behind: None, is_done: false }
    }
}

impl<B, R> Body for RewrittenBody<B, R>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: Into<BodyError>,
    R: Rewrite + Unpin,
{
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let body = self.get_mut();
        loop {
            if body.is_done {
                return Poll::Ready(body.behind.take().map(Ok));
            }
            let frame =
                ready!(Pin::new(&mut body.inner).poll_frame(context)).transpose().map_err(Into::into)?;
            match frame.map(Frame::into_data) {
                Some(Ok(data)) => body.held.extend_from_slice(&data),
                Some(Err(trailers)) => {
                    body.is_done = true;
                    body.behind = Some(trailers);
                }
                None => body.is_done = true,
            }
            let rewritten = body.rewrite.rewrite(&mut body.held, body.is_done);
            if !rewritten.is_empty() {
                return Poll::Ready(Some(Ok(Frame::data(rewritten.into()))));
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        let is_empty = self.held.is_empty() && self.behind.is_none();
        is_empty && (self.is_done || self.inner.is_end_stream())
    }

    fn size_hint(&self) -> SizeHint {
        match self.rewrite.keeps_length() && self.held.is_empty() {
            true => self.inner.size_hint(),
            false => SizeHint::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt;
    use proto::egress::SecretFields;

    use super::*;
    use crate::secrets::tests::secret;

    struct Pieces(std::collections::VecDeque<&'static [u8]>);

    impl Body for Pieces {
        type Data = Bytes;
        type Error = BodyError;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
            Poll::Ready(self.0.pop_front().map(|piece| Ok(Frame::data(Bytes::from_static(piece)))))
        }
    }

    async fn through<R: Rewrite + Unpin>(pieces: &[&'static [u8]], rewrite: R) -> Vec<u8> {
        let body = RewrittenBody::new(Pieces(pieces.iter().copied().collect()), rewrite);
        body.collect().await.unwrap().to_bytes().to_vec()
    }

    #[tokio::test]
    async fn values_are_put_in_and_masked_across_pieces() {
        let key = secret("key", &["api.test"], SecretFields::default());
        let put = || Replacements::new(vec![(key.clone(), b"VALUE".to_vec())]);
        assert_eq!(through(&[b"a key-pal", b"ph0aaaa b", b" key-"], put()).await, b"a VALUE b key-");
        assert_eq!(through(&[], put()).await, b"");
        let mask = || Mask::of([&b"value-of-key"[..]]);
        assert_eq!(through(&[b"a value-", b"of-", b"key b value"], mask()).await, b"a ************ b value");
    }

    #[test]
    fn only_a_mask_keeps_the_length() {
        let full = || http_body_util::Full::new(Bytes::from_static(b"abc"));
        let masked = RewrittenBody::new(full(), Mask::of([&b"value-of-key"[..]]));
        assert_eq!(masked.size_hint().exact(), Some(3));
        assert_eq!(RewrittenBody::new(full(), Replacements::new(Vec::new())).size_hint().exact(), None);
    }
}
