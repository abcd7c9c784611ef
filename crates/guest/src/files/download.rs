//! `GET /files`: one file, whole or a range, plain or gzipped.
//!
//! Invariant: opening never blocks (FIFOs, devices). A reported size is trusted only for files too large to be read
//! whole: files in `/proc` and `/sys` report wrong sizes.
//! Invariant: a slow caller holds no thread and at most five chunks; the next chunk is read while the one before is
//! being sent.

use std::{
    collections::VecDeque,
    fs::File,
    future::Future,
    io::{self, Read, Write},
    os::unix::fs::FileExt,
    path::Path,
    pin::Pin,
    rc::Rc,
    task::{Context, Poll},
};

use bytes::{Bytes, BytesMut};
use flate2::{Compression, write::GzEncoder};
use hyper::{
    HeaderMap, Request, Response, StatusCode,
    body::Incoming,
    header::{self, HeaderValue},
};
use rustix::fs::{Mode, OFlags};
use tokio::task::JoinHandle;

use super::encoding::{Encoding, negotiate};
use crate::{
    auth::{self, SignedOperation},
    paths,
    query::UrlQuery,
    reply::{BodySource, HttpReply, PlainRefusal, ReplyBody},
    server::GuestServer,
};

const PIECE_LEN: usize = 256 * 1024;
/// Chunks that were handed to the connection and may still be in use.
const GIVEN_MAX: usize = 3;

/// Answers with the contents of a file.
pub async fn download(guest: &Rc<GuestServer>, request: Request<Incoming>) -> HttpReply {
    let query = UrlQuery::parse(request.uri().query());
    let config = guest.config();
    let token = config.token.as_deref();
    if let Err(refusal) =
        auth::check_files(token, request.headers(), &query, SignedOperation::Read, super::now())
    {
        return refusal.reply();
    }
    let asked = DownloadRequest {
        path: query.bytes("path").unwrap_or_default().to_vec(),
        user: query
            .text("username")
            .filter(|name| !name.is_empty())
            .unwrap_or(&guest.config().user)
            .to_owned(),
        workdir: guest.config().workdir.clone(),
        headers: request.headers().clone(),
    };
    let opened = tokio::task::spawn_blocking(move || asked.open()).await;
    match opened.unwrap_or_else(|error| Err(PlainRefusal::internal(error.to_string()))) {
        Ok(answer) => answer.reply(),
        Err(refusal) => refusal.reply(),
    }
}

struct DownloadRequest {
    path: Vec<u8>,
    user: String,
    workdir: Option<String>,
    headers: HeaderMap,
}

/// The response, before its body is built.
struct DownloadResponse {
    status: StatusCode,
    headers: HeaderMap,
    contents: DownloadContents,
}

enum DownloadContents {
    Whole(Bytes),
    Part { file: File, from: u64, len: u64 },
    Endless { file: File, first: Vec<u8> },
    Gzip(File),
}

impl DownloadRequest {
    /// Opens the file; runs on a helper thread, because this may block.
    fn open(&self) -> Result<DownloadResponse, PlainRefusal> {
        let path = super::path_for(&self.path, &self.user, self.workdir.as_deref())?;
        let file = open(&path)?;
        let stat = file.metadata().map_err(|error| PlainRefusal::internal(error.to_string()))?;
        if stat.is_dir() {
            return Err(PlainRefusal::bad(format!("path '{}' is a directory", path.display())));
        }
        if !stat.is_file() {
            return Err(PlainRefusal::bad(format!("path '{}' is not a regular file", path.display())));
        }
        let plain_only = ["range", "if-modified-since", "if-none-match", "if-range"];
        let plain_only = plain_only.iter().any(|name| self.headers.contains_key(*name));
        let encoding = negotiate(&self.headers, plain_only)
            .map_err(|message| PlainRefusal::new(StatusCode::NOT_ACCEPTABLE, message))?;
        let mut headers = headers_for(&path);
        if encoding == Encoding::Gzip {
            headers.insert(header::CONTENT_ENCODING, HeaderValue::from_static("gzip"));
            return Ok(DownloadResponse {
                status: StatusCode::OK,
                headers,
                contents: DownloadContents::Gzip(file),
            });
        }
        headers.insert(header::ACCEPT_RANGES, HeaderValue::from_static("bytes"));
        self.plain(file, stat.len(), headers)
    }

    fn plain(&self, file: File, len: u64, mut headers: HeaderMap) -> Result<DownloadResponse, PlainRefusal> {
        let contents = read_or_trust(file, len)
            .map_err(|error| PlainRefusal::internal(format!("error reading file: {error}")))?;
        let len = match &contents {
            DownloadContents::Whole(bytes) => bytes.len() as u64,
            _ => len,
        };
        let fixed = !matches!(contents, DownloadContents::Endless { .. })
            && !self.headers.contains_key(header::IF_RANGE);
        let range = self.headers.get(header::RANGE).filter(|_| fixed);
        match range.and_then(|range| parse_range(range.to_str().ok()?, len)) {
            None => Ok(DownloadResponse { status: StatusCode::OK, headers, contents }),
            Some(None) => {
                let message = format!("the range lies outside of the file's {len} bytes");
                Err(PlainRefusal::new(StatusCode::RANGE_NOT_SATISFIABLE, message))
            }
            Some(Some((from, to))) => {
                let range = format!("bytes {from}-{}/{len}", to - 1);
                headers.extend(HeaderValue::from_str(&range).map(|range| (header::CONTENT_RANGE, range)));
                Ok(DownloadResponse {
                    status: StatusCode::PARTIAL_CONTENT,
                    headers,
                    contents: part(contents, from, to),
                })
            }
        }
    }
}

impl DownloadResponse {
    fn reply(self) -> HttpReply {
        let payload = match self.contents {
            DownloadContents::Whole(bytes) => ReplyBody::Whole(bytes),
            DownloadContents::Part { file, from, len } => {
                ReplyBody::sized(ChunkedBody::new(RangeReader { file, at: from, left: len }), len)
            }
            DownloadContents::Endless { file, first } => {
                ReplyBody::pieces(ChunkedBody::new(EndlessReader { file, first }))
            }
            DownloadContents::Gzip(file) => ReplyBody::pieces(ChunkedBody::new(GzipReader {
                file,
                encoder: Some(GzEncoder::new(Vec::new(), Compression::fast())),
            })),
        };
        let mut reply = Response::new(payload);
        *reply.status_mut() = self.status;
        *reply.headers_mut() = self.headers;
        reply
    }
}

fn open(path: &Path) -> Result<File, PlainRefusal> {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOCTTY;
    rustix::fs::open(path, flags, Mode::empty()).map(File::from).map_err(|error| {
        let error = io::Error::from(error);
        match error.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => {
                PlainRefusal::new(StatusCode::NOT_FOUND, format!("path '{}' does not exist", path.display()))
            }
            io::ErrorKind::InvalidFilename | io::ErrorKind::InvalidInput => {
                PlainRefusal::bad(format!("error opening file '{}': {error}", path.display()))
            }
            _ if super::is_link_loop(&error) => {
                PlainRefusal::bad(format!("path '{}' leads through too many symbolic links", path.display()))
            }
            // NXIO means a socket, or a device without a driver.
            _ if error.raw_os_error() == Some(rustix::io::Errno::NXIO.raw_os_error()) => {
                PlainRefusal::bad(format!("path '{}' is not a regular file", path.display()))
            }
            io::ErrorKind::PermissionDenied => PlainRefusal::new(
                StatusCode::FORBIDDEN,
                format!("error opening file '{}': {error}", path.display()),
            ),
            _ => PlainRefusal::internal(format!("error opening file '{}': {error}", path.display())),
        }
    })
}

/// Reads a small file whole. The size of a larger one is trusted; a file that holds more than it reports is streamed.
fn read_or_trust(file: File, len: u64) -> io::Result<DownloadContents> {
    if len > PIECE_LEN as u64 {
        return Ok(DownloadContents::Part { file, from: 0, len });
    }
    let mut first = Vec::with_capacity(usize::try_from(len).unwrap_or(0) + 1);
    (&file).take(PIECE_LEN as u64 + 1).read_to_end(&mut first)?;
    if first.len() <= PIECE_LEN {
        Ok(DownloadContents::Whole(first.into()))
    } else {
        Ok(DownloadContents::Endless { file, first })
    }
}

fn part(contents: DownloadContents, from: u64, to: u64) -> DownloadContents {
    match contents {
        DownloadContents::Whole(bytes) => {
            let place = |at: u64| usize::try_from(at).unwrap_or(usize::MAX).min(bytes.len());
            DownloadContents::Whole(bytes.slice(place(from)..place(to)))
        }
        DownloadContents::Part { file, .. } => DownloadContents::Part { file, from, len: to - from },
        other => other,
    }
}

/// Parses a single range into start and end: `None` if the header must be ignored, `Some(None)` if the range cannot
/// be satisfied.
fn parse_range(text: &str, len: u64) -> Option<Option<(u64, u64)>> {
    let (from, to) = text.strip_prefix("bytes=")?.split_once('-')?;
    let number = |text: &str| text.trim().parse::<u64>();
    match (from.trim(), to.trim()) {
        ("", last) => {
            let last = number(last).ok()?;
            Some((last > 0 && len > 0).then(|| (len.saturating_sub(last), len)))
        }
        (from, "") => number(from).ok().map(|from| (from < len).then_some((from, len))),
        (from, to) => {
            let (from, to) = (number(from).ok()?, number(to).ok()?);
            (from <= to).then(|| (from < len).then(|| (from, to.saturating_add(1).min(len))))
        }
    }
}

fn headers_for(path: &Path) -> HeaderMap {
    let mut headers = HeaderMap::new();
    let name: String = paths::name_of(path)
        .chars()
        .map(|c| if " !#$&+-.^_`|~".contains(c) || c.is_ascii_alphanumeric() { c } else { '_' })
        .collect();
    headers.extend(
        HeaderValue::from_str(&format!("inline; filename=\"{name}\""))
            .map(|name| (header::CONTENT_DISPOSITION, name)),
    );
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
    headers.insert(header::VARY, HeaderValue::from_static("Accept-Encoding"));
    headers
}

/// Reads the next chunk on a helper thread into a possibly reused buffer; the chunk is empty at the end.
trait ChunkReader: Send + 'static {
    fn next(&mut self, buffer: BytesMut) -> io::Result<Bytes>;
}

struct RangeReader {
    file: File,
    at: u64,
    left: u64,
}

impl ChunkReader for RangeReader {
    fn next(&mut self, mut buffer: BytesMut) -> io::Result<Bytes> {
        if self.left == 0 {
            return Ok(Bytes::new());
        }
        buffer.resize(usize::try_from(self.left).unwrap_or(PIECE_LEN).min(PIECE_LEN), 0);
        let read = self.file.read_at(&mut buffer, self.at)?;
        if read == 0 {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the file shrank while it was sent"));
        }
        buffer.truncate(read);
        self.at += read as u64;
        self.left -= read as u64;
        Ok(buffer.freeze())
    }
}

struct EndlessReader {
    file: File,
    first: Vec<u8>,
}

impl ChunkReader for EndlessReader {
    fn next(&mut self, buffer: BytesMut) -> io::Result<Bytes> {
        if !self.first.is_empty() {
            return Ok(std::mem::take(&mut self.first).into());
        }
        read_piece(&self.file, buffer).map(BytesMut::freeze)
    }
}

struct GzipReader {
    file: File,
    encoder: Option<GzEncoder<Vec<u8>>>,
}

impl ChunkReader for GzipReader {
    fn next(&mut self, mut buffer: BytesMut) -> io::Result<Bytes> {
        while let Some(encoder) = &mut self.encoder {
            buffer = read_piece(&self.file, buffer)?;
            if buffer.is_empty() {
                return self
                    .encoder
                    .take()
                    .map_or_else(|| Ok(Vec::new()), GzEncoder::finish)
                    .map(Bytes::from);
            }
            encoder.write_all(&buffer)?;
            if !encoder.get_ref().is_empty() {
                return Ok(std::mem::take(encoder.get_mut()).into());
            }
        }
        Ok(Bytes::new())
    }
}

fn read_piece(mut file: &File, mut buffer: BytesMut) -> io::Result<BytesMut> {
    buffer.resize(PIECE_LEN, 0);
    let read = file.read(&mut buffer)?;
    buffer.truncate(read);
    Ok(buffer)
}

/// A body that helper threads read chunk by chunk, one chunk ahead of the connection.
struct ChunkedBody<R> {
    state: ChunkState<R>,
    /// The last chunks that were handed to the connection: their memory is reused once the connection has dropped
    /// them.
    given: VecDeque<Bytes>,
}

enum ChunkState<R> {
    Idle(R),
    Reading(JoinHandle<(R, io::Result<Bytes>)>),
    Over,
}

impl<R: ChunkReader> ChunkedBody<R> {
    fn new(reader: R) -> Self {
        Self { state: ChunkState::Idle(reader), given: VecDeque::with_capacity(GIVEN_MAX) }
    }

    fn begin(&mut self, mut reader: R) {
        // New memory costs a page fault per page, which is a large part of reading a cached file.
        let spare = if self.given.len() == GIVEN_MAX { self.given.pop_front() } else { None };
        let buffer = spare.and_then(|piece| piece.try_into_mut().ok()).unwrap_or_default();
        self.state = ChunkState::Reading(tokio::task::spawn_blocking(move || {
            let piece = reader.next(buffer);
            (reader, piece)
        }));
    }
}

impl<R: ChunkReader> BodySource for ChunkedBody<R> {
    fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<io::Result<Bytes>>> {
        if let ChunkState::Idle(_) = &self.state
            && let ChunkState::Idle(reader) = std::mem::replace(&mut self.state, ChunkState::Over)
        {
            self.begin(reader);
        }
        let ChunkState::Reading(reading) = &mut self.state else { return Poll::Ready(None) };
        let read = std::task::ready!(Pin::new(reading).poll(cx));
        self.state = ChunkState::Over;
        match read {
            Err(error) => Poll::Ready(Some(Err(io::Error::other(error)))),
            Ok((_, Err(error))) => Poll::Ready(Some(Err(error))),
            Ok((_, Ok(piece))) if piece.is_empty() => Poll::Ready(None),
            Ok((reader, Ok(piece))) => {
                self.given.push_back(piece.clone());
                self.begin(reader);
                Poll::Ready(Some(Ok(piece)))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_read_as_http_has_them() {
        for (text, wanted) in [
            ("bytes=0-4", Some(Some((0, 5)))),
            ("bytes=5-", Some(Some((5, 10)))),
            ("bytes=-3", Some(Some((7, 10)))),
            ("bytes=-30", Some(Some((0, 10)))),
            ("bytes=8-100", Some(Some((8, 10)))),
            ("bytes=10-", Some(None)),
            ("bytes=-0", Some(None)),
            ("bytes=5-2", None),
            ("bytes=0-1,4-5", None),
            ("lines=1-2", None),
        ] {
            assert_eq!(parse_range(text, 10), wanted, "{text}");
        }
    }
}
