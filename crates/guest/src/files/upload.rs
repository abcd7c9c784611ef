//! `POST /files`: uploads, as a form with several files or as the raw bytes of one.
//!
//! Invariant: a slow caller holds no thread and one chunk of memory; each chunk is written before more is read.
//! Invariant: an upload that breaks off removes a new file, and leaves a file that existed with its old contents.

use std::{
    fs::File,
    io::{self, Seek, Write},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    pin::Pin,
    rc::Rc,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use bytes::{Buf, Bytes};
use flate2::write::GzDecoder;
use http_body_util::{BodyDataStream, BodyExt};
use hyper::{
    HeaderMap, Request, StatusCode,
    body::{Body, Frame, Incoming},
    header,
};
use multer::{Field, Multipart};
use rustix::fs::{FallocateFlags, Mode, OFlags};
use serde::Serialize;

use super::{give, give_path, make_dirs, metadata};
use crate::{
    auth::{self, SignedOperation},
    drain, paths,
    query::UrlQuery,
    reply::{self, HttpReply, PlainRefusal},
    server::GuestServer,
    users::GuestUser,
};

/// Bytes that are gathered before they are written.
const PIECE_LEN: usize = 256 * 1024;
/// Most bytes that may follow the last part of a form, and how long they may take.
const EPILOGUE_LEN_MAX: usize = 64 << 10;
const EPILOGUE_WAIT: Duration = Duration::from_secs(2);
/// Compressed bytes that are inflated at once: at worst they become a thousand times as many.
const DEFLATED_LEN: usize = 2048;
const PARTS_MAX: usize = 100_000;
/// How long a caller may be silent.
const WAIT: Duration = Duration::from_secs(300);

/// An uploaded file, as the answer lists it.
#[derive(Debug, Serialize)]
struct UploadedFile {
    path: String,
    name: String,
    #[serde(rename = "type")]
    kind: &'static str,
    #[serde(skip_serializing_if = "metadata::Metadata::is_empty")]
    metadata: metadata::Metadata,
}

/// Stores the files of a request and answers with their list.
pub async fn upload(guest: &Rc<GuestServer>, request: Request<Incoming>) -> HttpReply {
    let query = UrlQuery::parse(request.uri().query());
    let config = guest.config();
    let token = config.token.as_deref();
    let (head, mut body) = request.into_parts();
    let headers = &head.headers;
    let taken = match auth::check_files(token, headers, &query, SignedOperation::Write, super::now()) {
        Ok(()) => take(guest, &query, headers, &mut body).await,
        Err(refusal) => Err(refusal),
    };
    match taken {
        Ok(uploaded) => reply::json(&uploaded),
        Err(refusal) => {
            drain::read_on(body);
            refusal.reply()
        }
    }
}

async fn take(
    guest: &GuestServer,
    query: &UrlQuery,
    headers: &HeaderMap,
    body: &mut Incoming,
) -> Result<Vec<UploadedFile>, PlainRefusal> {
    let gzip = is_gzip(headers)?;
    let metadata = metadata::from_headers(headers)
        .map_err(|message| PlainRefusal::bad(format!("invalid metadata: {message}")))?;
    let name =
        query.text("username").filter(|name| !name.is_empty()).unwrap_or(&guest.config().user).to_owned();
    let workdir = guest.config().workdir.clone();
    let (user, _) = run_on_helper(move || super::user_and_path(b"", &name, workdir.as_deref())).await?;
    let to = UploadTarget {
        user: Arc::new(user),
        workdir: guest.config().workdir.clone(),
        metadata: Arc::new(metadata),
    };
    let kind = headers.get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    let path = query.bytes("path").map(<[u8]>::to_vec);
    match kind.split(';').next().unwrap_or_default().trim().to_ascii_lowercase().as_str() {
        "application/octet-stream" => {
            let path = path
                .ok_or_else(|| PlainRefusal::bad("path query parameter is required for raw body upload"))?;
            Ok(vec![raw(&to, &path, body, gzip).await?])
        }
        kind_word if kind_word.starts_with("multipart/") => {
            let boundary = multer::parse_boundary(kind)
                .map_err(|error| PlainRefusal::bad(format!("error parsing multipart form: {error}")))?;
            if gzip {
                let form = Multipart::new(BodyDataStream::new(InflatedBody::new(body)), boundary);
                return parts(&to, path.as_deref(), form).await;
            }
            let uploaded =
                parts(&to, path.as_deref(), Multipart::new(BodyDataStream::new(&mut *body), boundary)).await;
            if uploaded.is_ok() {
                read_to_end(body).await;
            }
            uploaded
        }
        _ => Err(PlainRefusal::bad(format!(
            "unsupported content type: {kind}, expected multipart/form-data or application/octet-stream"
        ))),
    }
}

/// Reads the bytes after the last part. The kernel resets a connection that is closed with unread bytes, so a caller
/// that was still sending would lose the answer.
async fn read_to_end(body: &mut Incoming) {
    let mut left = EPILOGUE_LEN_MAX;
    let rest = async {
        while let Some(Ok(frame)) = body.frame().await {
            left = left.saturating_sub(frame.data_ref().map_or(0, Bytes::len));
            if left == 0 {
                return;
            }
        }
    };
    let _ = tokio::time::timeout(EPILOGUE_WAIT, rest).await;
}

async fn raw(
    to: &UploadTarget,
    path: &[u8],
    body: &mut Incoming,
    gzip: bool,
) -> Result<UploadedFile, PlainRefusal> {
    let path = to.path(path)?;
    let cut = |error: hyper::Error| PlainRefusal::bad(format!("the request was cut: {error}"));
    let next = async || loop {
        match body.frame().await.transpose().map_err(cut)? {
            None => return Ok(None),
            Some(frame) => {
                if let Ok(data) = frame.into_data() {
                    return Ok(Some(data));
                }
            }
        }
    };
    store(to, path, next, gzip).await
}

async fn parts(
    to: &UploadTarget,
    path: Option<&[u8]>,
    mut form: Multipart<'_>,
) -> Result<Vec<UploadedFile>, PlainRefusal> {
    let broken = |error: multer::Error| PlainRefusal::bad(format!("error reading form: {error}"));
    let mut uploaded: Vec<UploadedFile> = Vec::new();
    for _ in 0..PARTS_MAX {
        let Some(mut field) = in_time(form.next_field()).await?.map_err(broken)? else { return Ok(uploaded) };
        if field.name() != Some("file") {
            continue;
        }
        let path = to.path(&target_of(&field, path)?)?;
        if uploaded.iter().any(|file| Path::new(&file.path) == path) {
            return Err(PlainRefusal::bad(format!(
                "you cannot upload multiple files to the same path '{}' in one upload request, \
                 only the first specified file was uploaded",
                path.display()
            )));
        }
        let next = async || field.chunk().await.map_err(broken);
        uploaded.push(store(to, path, next, false).await?);
    }
    Err(PlainRefusal::bad(format!("a form may hold {PARTS_MAX} parts")))
}

fn target_of(field: &Field<'_>, path: Option<&[u8]>) -> Result<Vec<u8>, PlainRefusal> {
    match (path, field.file_name()) {
        (Some(path), _) => Ok(path.to_vec()),
        (None, Some(name)) if !name.is_empty() => Ok(name.as_bytes().to_vec()),
        _ => Err(PlainRefusal::bad("error resolving path: the part has no file name")),
    }
}

/// Writes the chunks that `next` yields.
async fn store(
    to: &UploadTarget,
    path: PathBuf,
    mut next: impl AsyncFnMut() -> Result<Option<Bytes>, PlainRefusal>,
    gzip: bool,
) -> Result<UploadedFile, PlainRefusal> {
    let (user, metadata) = (to.user.clone(), to.metadata.clone());
    let at = path.clone();
    let (file, onto) = run_on_helper(move || open(&at, &user)).await?;
    let mut writer = if gzip {
        UploadWriter::Inflating(Box::new(GzDecoder::new(file)))
    } else {
        UploadWriter::Plain(file)
    };
    loop {
        let (pieces, more) = gather(&mut next).await?;
        if !pieces.is_empty() {
            writer = run_on_helper(move || writer.write(&pieces)).await?;
        }
        if !more {
            break;
        }
    }
    run_on_helper(move || writer.finish(&path, onto, &metadata)).await
}

async fn gather(
    next: &mut impl AsyncFnMut() -> Result<Option<Bytes>, PlainRefusal>,
) -> Result<(Vec<Bytes>, bool), PlainRefusal> {
    let mut pieces = Vec::new();
    let mut len = 0;
    while len < PIECE_LEN {
        match in_time(next()).await?? {
            None => return Ok((pieces, false)),
            Some(piece) => {
                len += piece.len();
                pieces.push(piece);
            }
        }
    }
    Ok((pieces, true))
}

/// The user for whom files are written, and where relative paths begin.
struct UploadTarget {
    user: Arc<GuestUser>,
    workdir: Option<String>,
    metadata: Arc<metadata::Metadata>,
}

impl UploadTarget {
    fn path(&self, path: &[u8]) -> Result<PathBuf, PlainRefusal> {
        paths::resolve(path, &self.user, self.workdir.as_deref())
            .map_err(|fault| PlainRefusal::bad(fault.message))
    }
}

enum UploadWriter {
    Plain(File),
    Inflating(Box<GzDecoder<File>>),
}

impl UploadWriter {
    fn write(mut self, pieces: &[Bytes]) -> Result<Self, PlainRefusal> {
        for piece in pieces {
            let written = match &mut self {
                Self::Plain(file) => file.write_all(piece),
                Self::Inflating(decoder) => decoder.write_all(piece),
            };
            written.map_err(|error| write_error(&error))?;
        }
        Ok(self)
    }

    fn finish(
        self,
        path: &Path,
        onto: UploadDestination,
        attached: &metadata::Metadata,
    ) -> Result<UploadedFile, PlainRefusal> {
        let file = match self {
            Self::Plain(file) => file,
            Self::Inflating(decoder) => decoder.finish().map_err(|error| write_error(&error))?,
        };
        let (file, unfinished) = match onto {
            UploadDestination::Itself => (file, None),
            UploadDestination::New(unfinished) => (file, Some(unfinished)),
            UploadDestination::Existing(existing) => {
                (replace(file, existing).map_err(|error| write_error(&error))?, None)
            }
        };
        metadata::write(&file, attached).map_err(|error| write_error(&error))?;
        drop(file);
        if let Some(unfinished) = unfinished {
            unfinished.keep();
        }
        let (name, metadata) = (paths::name_of(path), metadata::read(path));
        Ok(UploadedFile { path: path.to_string_lossy().into_owned(), name, kind: "file", metadata })
    }
}

/// The relation between the file being written and the file that the caller named.
enum UploadDestination {
    /// It is the named file, which existed and is empty.
    Itself,
    /// It is the named file, which did not exist before.
    New(PartialFile),
    /// It has no name; at the end its contents replace those of this existing file.
    Existing(File),
}

/// A new file that is removed on drop unless the upload finished.
struct PartialFile {
    path: PathBuf,
    inode: u64,
}

impl PartialFile {
    fn keep(self) {
        std::mem::forget(self);
    }
}

impl Drop for PartialFile {
    fn drop(&mut self) {
        // If another process replaced the file meanwhile, its file stays.
        if std::fs::symlink_metadata(&self.path).is_ok_and(|found| found.ino() == self.inode) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Replaces the contents of one file by those of another. The inode stays, so watches and open descriptors stay
/// valid. Space is allocated first: an upload that does not fit changes nothing.
fn replace(mut from: File, mut onto: File) -> io::Result<File> {
    let (len, before) = (from.metadata()?.len(), onto.metadata()?.len());
    if len > before
        && let Err(error) = rustix::fs::fallocate(&onto, FallocateFlags::empty(), 0, len)
        && error != rustix::io::Errno::OPNOTSUPP
    {
        onto.set_len(before)?;
        return Err(error.into());
    }
    from.rewind()?;
    io::copy(&mut from, &mut onto)?;
    onto.set_len(len)?;
    Ok(onto)
}

fn open(path: &Path, user: &GuestUser) -> Result<(File, UploadDestination), PlainRefusal> {
    if let Some(parent) = path.parent() {
        make_dirs(parent, user).map_err(|error| create_error("error ensuring directories", &error))?;
    }
    let existing = std::fs::metadata(path);
    match &existing {
        Ok(found) if found.is_dir() => {
            return Err(PlainRefusal::bad(format!("path is a directory: {}", path.display())));
        }
        Ok(found) if !found.is_file() => {
            return Err(PlainRefusal::bad(format!("path is not a regular file: {}", path.display())));
        }
        // As in envd, the owner changes before the file is opened, so that a watcher never sees new contents with the
        // old owner.
        Ok(_) => {
            give_path(path, user).map_err(|error| create_error("error changing file ownership", &error))?
        }
        Err(_) => {}
    }
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOCTTY;
    let file = rustix::fs::open(path, flags, Mode::from_raw_mode(0o666))
        .map_err(|error| create_error("error opening file", &error.into()))?;
    let file = File::from(file);
    if !file.metadata().is_ok_and(|found| found.is_file()) {
        return Err(PlainRefusal::bad(format!("path is not a regular file: {}", path.display())));
    }
    if existing.is_err() {
        give(&file, user).map_err(|error| create_error("error changing file ownership", &error))?;
    }
    match file.metadata() {
        Ok(found) if existing.is_err() && found.len() == 0 => {
            let unfinished = PartialFile { path: path.to_owned(), inode: found.ino() };
            return Ok((file, UploadDestination::New(unfinished)));
        }
        Ok(found) if found.len() == 0 => return Ok((file, UploadDestination::Itself)),
        _ => {}
    }
    let beside = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    match rustix::fs::open(path.parent().unwrap_or(Path::new("/")), beside, Mode::RUSR | Mode::WUSR) {
        Ok(aside) => Ok((aside.into(), UploadDestination::Existing(file))),
        // The file system has no O_TMPFILE, or the directory is not writable. Then the file is truncated and
        // overwritten, as envd does.
        Err(_) => {
            file.set_len(0).map_err(|error| create_error("error opening file", &error))?;
            Ok((file, UploadDestination::Itself))
        }
    }
}

fn create_error(what: &str, error: &io::Error) -> PlainRefusal {
    let status = match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => StatusCode::INSUFFICIENT_STORAGE,
        io::ErrorKind::NotADirectory | io::ErrorKind::InvalidFilename | io::ErrorKind::InvalidInput => {
            StatusCode::BAD_REQUEST
        }
        _ if super::is_link_loop(error) => StatusCode::BAD_REQUEST,
        io::ErrorKind::ExecutableFileBusy => StatusCode::CONFLICT,
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => StatusCode::FORBIDDEN,
        _ => StatusCode::INTERNAL_SERVER_ERROR,
    };
    PlainRefusal::new(status, format!("{what}: {error}"))
}

fn write_error(error: &io::Error) -> PlainRefusal {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            PlainRefusal::new(StatusCode::INSUFFICIENT_STORAGE, "not enough disk space available")
        }
        // flate2 reports bytes that are not gzip with these kinds.
        io::ErrorKind::InvalidInput | io::ErrorKind::UnexpectedEof | io::ErrorKind::InvalidData => {
            PlainRefusal::bad(format!("error decompressing request body: {error}"))
        }
        _ => PlainRefusal::internal(format!("error writing file: {error}")),
    }
}

fn is_gzip(headers: &HeaderMap) -> Result<bool, PlainRefusal> {
    let encoding =
        headers.get(header::CONTENT_ENCODING).and_then(|value| value.to_str().ok()).unwrap_or_default();
    match encoding.trim().to_ascii_lowercase().as_str() {
        "" | "identity" => Ok(false),
        "gzip" => Ok(true),
        other => Err(PlainRefusal::bad(format!("unsupported Content-Encoding: {other}, supported: [gzip]"))),
    }
}

async fn in_time<T>(work: impl Future<Output = T>) -> Result<T, PlainRefusal> {
    let late = |_| PlainRefusal::new(StatusCode::REQUEST_TIMEOUT, "the upload stalled");
    tokio::time::timeout(WAIT, work).await.map_err(late)
}

async fn run_on_helper<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, PlainRefusal> + Send + 'static,
) -> Result<T, PlainRefusal> {
    tokio::task::spawn_blocking(work)
        .await
        .unwrap_or_else(|error| Err(PlainRefusal::internal(error.to_string())))
}

/// A gzipped body that is inflated as it is read.
struct InflatedBody<'a> {
    body: &'a mut Incoming,
    decoder: GzDecoder<Vec<u8>>,
    waiting: Bytes,
    over: bool,
}

impl<'a> InflatedBody<'a> {
    fn new(body: &'a mut Incoming) -> Self {
        Self { body, decoder: GzDecoder::new(Vec::new()), waiting: Bytes::new(), over: false }
    }

    fn inflate(&mut self) -> io::Result<Bytes> {
        let len = self.waiting.len().min(DEFLATED_LEN);
        self.decoder.write_all(&self.waiting[..len])?;
        self.waiting.advance(len);
        Ok(std::mem::take(self.decoder.get_mut()).into())
    }
}

impl Body for InflatedBody<'_> {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        loop {
            if !self.waiting.is_empty() {
                match self.inflate() {
                    Ok(bytes) if bytes.is_empty() => continue,
                    inflated => return Poll::Ready(Some(inflated.map(Frame::data))),
                }
            }
            if self.over {
                return Poll::Ready(None);
            }
            match std::task::ready!(Pin::new(&mut *self.body).poll_frame(cx)) {
                Some(Err(error)) => return Poll::Ready(Some(Err(io::Error::other(error)))),
                Some(Ok(frame)) => self.waiting = frame.into_data().unwrap_or_default(),
                None => {
                    self.over = true;
                    let last = self.decoder.try_finish().map(|()| std::mem::take(self.decoder.get_mut()));
                    match last {
                        Ok(last) if last.is_empty() => {}
                        last => return Poll::Ready(Some(last.map(|last| Frame::data(last.into())))),
                    }
                }
            }
        }
    }
}
