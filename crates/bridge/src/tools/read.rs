//! `read_file`: lines of a text file, or a picture.

use base64::{Engine, engine::general_purpose::STANDARD};
use brain::{
    agent::CallResult,
    model::{ImageData, ResultBlock, ToolSchema},
};
use proto::file_call::{FileAnswer, FileError, FileOperation};
use serde_json::{Map, Value, json};

use super::{
    arguments::ArgumentReader,
    file_tool::{FileRequest, FileTask, FileTool, checked_path, odd_answer},
    image,
    text::RESULT_LEN_MAX,
};
use crate::files::reason_word;

const NAME: &str = "read_file";
const DESCRIPTION: &str = "Reads a file from the filesystem. Assume any path the user provides is valid; reading a missing file returns an error.

Usage:
- By default, it reads up to 100 lines starting from the beginning of the file. Use `offset`/`limit` to page through large files instead of reading them whole.
- A status header, `@@ field | field | ... @@`, sits above the file content, and every line after it is verbatim file content. When content is truncated, there may be an explanation before the header. Never include the header when editing.
- Speculatively batch multiple `read_file` calls in one response when several files may be useful.
- An empty file returns a system-reminder warning in place of contents.
- Large tool results may be offloaded to a file; the tool message gives the path. Read that path here, paging with `offset`/`limit`.
- Images (`.png`, `.jpg`, etc.), audio, video, and PDFs return multimodal content blocks (https://docs.langchain.com/oss/python/langchain/messages#multimodal).
- For images and PDFs, pagination via `offset`/`limit` is text-only - supply `file_path` only
- Always read a file before editing it.";
/// How many lines are read unless the call says so.
const LIMIT: i64 = 100;
/// The longest file that is no text, in bytes.
const BINARY_LEN_MAX: u64 = 512_000;
const EMPTY: &str = "System reminder: File exists but has empty contents";

/// Extensions of files that are no text, with Deep Agents' kind and the media type of each.
const BINARY_KINDS: &[(&str, &str, &str)] = &[
    ("png", "image", "image/png"),
    ("jpeg", "image", "image/jpeg"),
    ("jpg", "image", "image/jpeg"),
    ("webp", "image", "image/webp"),
    ("gif", "image", "image/gif"),
    ("heic", "image", "image/heic"),
    ("heif", "image", "image/heif"),
    ("mp4", "video", "video/mp4"),
    ("mpeg", "video", "video/mpeg"),
    ("mov", "video", "video/quicktime"),
    ("avi", "video", "video/x-msvideo"),
    ("flv", "video", "video/x-flv"),
    ("mpg", "video", "video/mpeg"),
    ("webm", "video", "video/webm"),
    ("wmv", "video", "video/x-ms-wmv"),
    ("3gpp", "video", "video/3gpp"),
    ("wav", "audio", "audio/x-wav"),
    ("mp3", "audio", "audio/mpeg"),
    ("aiff", "audio", "audio/x-aiff"),
    ("aac", "audio", "audio/aac"),
    ("ogg", "audio", "audio/ogg"),
    ("flac", "audio", "audio/flac"),
    ("pdf", "file", "application/pdf"),
    ("ppt", "file", "application/vnd.ms-powerpoint"),
    ("pptx", "file", "application/vnd.openxmlformats-officedocument.presentationml.presentation"),
];

/// Reads a file.
pub struct ReadTool;

/// The arguments of a call.
struct ReadRequest {
    path: String,
    offset: i64,
    limit: i64,
}

impl FileTool for ReadTool {
    fn schema(&self) -> ToolSchema {
        ToolSchema {
            name: NAME.into(),
            description: DESCRIPTION.into(),
            parameters: json!({
                "type": "object",
                "properties": {
                    "file_path": {
                        "type": "string",
                        "description": "Absolute path to the file to read. Must be absolute, not relative.",
                    },
                    "offset": {
                        "type": "integer",
                        "default": 0,
                        "description": "Line number to start reading from (0-indexed). Use for pagination of large files.",
                    },
                    "limit": {
                        "type": "integer",
                        "default": LIMIT,
                        "description": "Maximum number of lines to read. Use for pagination of large files.",
                    },
                },
                "required": ["file_path"],
            }),
        }
    }

    fn prepare(&self, arguments: &Map<String, Value>) -> Result<FileTask, String> {
        let mut read = ArgumentReader::new(NAME, arguments);
        let path = read.text("file_path");
        let offset = read.optional_integer("offset").unwrap_or(0);
        let limit = read.optional_integer("limit").unwrap_or(LIMIT);
        read.finish()?;
        let path = checked_path(path)?;
        let request = FileRequest::Operation(FileOperation::Read {
            path: path.clone(),
            offset: u64::try_from(offset).unwrap_or(0),
            limit: u64::try_from(limit).unwrap_or(0),
        });
        let asked = ReadRequest { path, offset, limit };
        Ok(FileTask { request, show: Box::new(move |answer| show(&asked, answer)) })
    }
}

fn show(asked: &ReadRequest, answer: FileAnswer) -> CallResult {
    match answer {
        FileAnswer::Text { content, total_lines, start_line, end_line } => {
            let page = TextPage { content, total_lines, start_line, end_line };
            match binary_kind(&asked.path) {
                // Deep Agents goes by the name; a file of that name may hold text all the same.
                Some((kind, media_type)) if total_lines > 0 => {
                    CallResult::text(not_attached(&asked.path, kind, media_type))
                }
                _ => show_text(asked, &page),
            }
        }
        FileAnswer::Binary { base64, len } => show_binary(asked, base64, len),
        FileAnswer::Error { reason, path } => {
            let word = match reason {
                FileError::IsDirectory => "not_a_file".into(),
                FileError::TooLarge { .. } if binary_kind(&path).is_some() => too_large(),
                FileError::TooLarge { .. } => format!(
                    "the lines are too long to be read. Read a part of it with execute(command='head -c 10000 {path}')"
                ),
                reason => reason_word(&reason),
            };
            CallResult::error(format!("Error: File '{path}': {word}"))
        }
        _ => odd_answer(),
    }
}

fn too_large() -> String {
    format!("Binary file exceeds maximum preview size of {BINARY_LEN_MAX} bytes")
}

fn not_attached(path: &str, kind: &str, media_type: &str) -> String {
    format!(
        "[read_file: {path} was not attached because this model does not support {kind} content ({media_type}).]"
    )
}

/// The kind and the media type of a file by its name; none for text.
fn binary_kind(path: &str) -> Option<(&'static str, &'static str)> {
    let name = path.rsplit('/').next().unwrap_or(path);
    let (stem, extension) = name.rsplit_once('.')?;
    let extension = extension.to_ascii_lowercase();
    let known = BINARY_KINDS.iter().find(|(known, ..)| *known == extension && !stem.is_empty())?;
    Some((known.1, known.2))
}

fn show_binary(asked: &ReadRequest, base64: String, len: u64) -> CallResult {
    if len > BINARY_LEN_MAX {
        return CallResult::error(format!("Error: File '{}': {}", asked.path, too_large()));
    }
    let bytes = STANDARD.decode(&base64).unwrap_or_default();
    if let Some(media_type) = image::media_type(&bytes) {
        let picture = ResultBlock::Image(ImageData { media_type: media_type.into(), data: base64 });
        return CallResult { blocks: vec![picture], ..CallResult::text("") };
    }
    let (kind, media_type) = binary_kind(&asked.path).unwrap_or(("file", "application/octet-stream"));
    CallResult::text(not_attached(&asked.path, kind, media_type))
}

/// Lines of a file.
struct TextPage {
    content: String,
    total_lines: u64,
    start_line: u64,
    end_line: u64,
}

fn show_text(asked: &ReadRequest, page: &TextPage) -> CallResult {
    if page.total_lines == 0 {
        return CallResult::text(EMPTY);
    }
    if asked.limit <= 0 {
        return CallResult::text(format!(
            "System reminder: no lines were read because `limit` was {}. The file was not inspected and may have contents; \
             retry with `limit` >= 1 to read it.",
            asked.limit
        ));
    }
    if page.start_line == 0 {
        return CallResult::error(format!(
            "Error: File '{}': Line offset {} exceeds file length ({} lines)",
            asked.path, asked.offset, page.total_lines
        ));
    }
    let is_whole = page.start_line == 1 && page.end_line == page.total_lines;
    if is_whole && page.content.trim().is_empty() {
        return CallResult::text(EMPTY);
    }
    let text = page.content.replace("\r\n", "\n").replace('\r', "\n");
    let body = text.strip_suffix('\n').unwrap_or(&text);
    let mut notices = Vec::new();
    if asked.offset < 0 {
        notices.push(format!(
            "[Requested offset {} is before the start of the file; read from line 1 instead.]",
            asked.offset
        ));
    }
    CallResult::text(fit_page(&asked.path, body, page, notices))
}

/// The header fields that say which lines follow, and where to read on.
fn fields(page: &TextPage, end_line: u64) -> Vec<String> {
    let mut fields = vec![format!("lines {}-{end_line} of {}", page.start_line, page.total_lines)];
    if end_line < page.total_lines {
        fields.push(format!("next offset {end_line}"));
    }
    fields
}

fn assemble(body: &str, fields: &[String], notices: &[String]) -> String {
    let header = format!("@@ {} @@", fields.join(" | "));
    let parts: Vec<&str> = notices.iter().map(String::as_str).chain([header.as_str(), body]).collect();
    parts.join("\n")
}

fn len(text: &str) -> usize {
    text.chars().count()
}

/// The page, or as many of its lines as fit. The header never says more than what follows it.
fn fit_page(path: &str, body: &str, page: &TextPage, mut notices: Vec<String>) -> String {
    let whole = assemble(body, &fields(page, page.end_line), &notices);
    if len(&whole) < RESULT_LEN_MAX {
        return whole;
    }
    notices.push(format!(
        "[Output was truncated due to size limits. The file content is very large. Consider reformatting the file to make \
         it easier to navigate. For example, if this is JSON, use execute(command='jq . {path}') to pretty-print it with \
         line breaks. For other formats, you can use appropriate formatting tools to split long lines.]"
    ));
    let cut = |end_line: u64| [fields(page, end_line), vec!["truncated due to size".to_owned()]].concat();
    let (mut best, mut position, mut letters) = (None, 0, 0);
    for (end_line, line) in (page.start_line..=page.end_line).zip(body.split('\n')) {
        letters += len(line);
        let reserved = len(&assemble("", &cut(end_line), &notices));
        if reserved + letters > RESULT_LEN_MAX {
            break;
        }
        position += line.len();
        best = Some((position, end_line));
        position += 1;
        letters += 1;
    }
    match best {
        Some((position, end_line)) => assemble(&body[..position], &cut(end_line), &notices),
        None => fit_line(body, page, &notices),
    }
}

/// The beginning of a line that is too long. No offset leads to its rest.
fn fit_line(body: &str, page: &TextPage, notices: &[String]) -> String {
    let line = body.split('\n').next().unwrap_or(body);
    let total = len(line);
    let fields = |shown: usize| {
        vec![
            format!("lines {}-{} of {}", page.start_line, page.start_line, page.total_lines),
            "truncated mid-line".to_owned(),
            format!("{shown} of {total} chars"),
        ]
    };
    let reserved = len(&assemble("", &fields(total), notices));
    let shown = RESULT_LEN_MAX.saturating_sub(reserved).min(total);
    let kept: String = line.chars().take(shown).collect();
    assemble(&kept, &fields(shown), notices)
}

#[cfg(test)]
mod tests {
    use proto::file_text::read_lines;

    use super::{super::image::tests::PIXEL_PNG, *};

    /// The result for a file with this content.
    fn read(path: &str, content: &str, offset: i64, limit: i64) -> String {
        let asked = ReadRequest { path: path.into(), offset, limit };
        let page = read_lines(content, u64::try_from(offset).unwrap_or(0), u64::try_from(limit).unwrap_or(0));
        show(&asked, page).blocks[0].as_text().unwrap_or_default().to_owned()
    }

    /// Printed by Deep Agents 0.7.32.
    #[test]
    fn texts_are_those_of_deep_agents() {
        assert_eq!(
            read("/f", "vm\n", -3, 100),
            "[Requested offset -3 is before the start of the file; read from line 1 instead.]\n@@ lines 1-1 of 1 @@\nvm"
        );
        assert_eq!(read("/f", "z\n\ny\n", 0, 100), "@@ lines 1-3 of 3 @@\nz\n\ny");
        assert_eq!(read("/f", "z\n\ny\n", 0, 2), "@@ lines 1-2 of 3 | next offset 2 @@\nz\n");
        assert_eq!(read("/f", "a\r\nb\r\n", 0, 100), "@@ lines 1-2 of 2 @@\na\nb");
        assert_eq!(
            read("/f", "vm\n", 5, 100),
            "Error: File '/f': Line offset 5 exceeds file length (1 lines)"
        );
        assert_eq!(
            read("/f", "vm\n", 0, 0),
            "System reminder: no lines were read because `limit` was 0. The file was not inspected and may have contents; retry with `limit` >= 1 to read it."
        );
        for empty in ["", "\n", "  \n\n"] {
            assert_eq!(read("/f", empty, 0, 100), EMPTY);
        }
        assert_eq!(read("/f", "\n\nx\n", 0, 2), "@@ lines 1-2 of 3 | next offset 2 @@\n\n");
    }

    fn error(reason: FileError, path: &str) -> String {
        let asked = ReadRequest { path: path.into(), offset: 0, limit: 100 };
        show(&asked, FileAnswer::Error { reason, path: path.into() }).blocks[0].as_text().unwrap().to_owned()
    }

    #[test]
    fn errors_are_those_of_deep_agents() {
        assert_eq!(error(FileError::NotFound, "/nope"), "Error: File '/nope': file_not_found");
        assert_eq!(error(FileError::IsDirectory, "/tmp"), "Error: File '/tmp': not_a_file");
        assert_eq!(error(FileError::PermissionDenied, "/x"), "Error: File '/x': permission_denied");
        assert_eq!(
            error(FileError::TooLarge { len: 9 << 20 }, "/x.png"),
            "Error: File '/x.png': Binary file exceeds maximum preview size of 512000 bytes"
        );
    }

    #[test]
    fn a_page_that_is_too_long_ends_at_a_whole_line() {
        let content: String = (0..2000).map(|line| format!("{line:04}{}\n", "x".repeat(96))).collect();
        let shown = read("/f", &content, 0, 2000);
        assert!(len(&shown) <= RESULT_LEN_MAX);
        let header = shown.lines().nth(1).unwrap();
        let lines = shown.lines().count() - 2;
        assert_eq!(
            header,
            format!("@@ lines 1-{lines} of 2000 | next offset {lines} | truncated due to size @@")
        );
        assert!(lines > 780 && shown.ends_with(&format!("{:04}{}", lines - 1, "x".repeat(96))));
    }

    #[test]
    fn a_line_that_is_too_long_is_cut_and_said() {
        let shown = read("/f", &"é".repeat(100_000), 0, 100);
        assert_eq!(len(&shown), RESULT_LEN_MAX - "100000".len() + "79540".len());
        let header = shown.lines().nth(1).unwrap();
        let letters = shown.lines().nth(2).unwrap().chars().count();
        assert_eq!(header, format!("@@ lines 1-1 of 1 | truncated mid-line | {letters} of 100000 chars @@"));
    }

    #[test]
    fn a_picture_is_a_block_and_other_bytes_are_named() {
        let asked = |path: &str| ReadRequest { path: path.into(), offset: 0, limit: 100 };
        let binary =
            |bytes: &[u8]| FileAnswer::Binary { base64: STANDARD.encode(bytes), len: bytes.len() as u64 };
        let picture = show(&asked("/a.png"), binary(PIXEL_PNG));
        let expected = ImageData { media_type: "image/png".into(), data: STANDARD.encode(PIXEL_PNG) };
        assert_eq!(picture.blocks, [ResultBlock::Image(expected)]);
        let other = show(&asked("/a.pdf"), binary(b"%PDF\xff"));
        assert_eq!(
            other.blocks[0].as_text().unwrap(),
            "[read_file: /a.pdf was not attached because this model does not support file content (application/pdf).]"
        );
        let false_picture = show(&asked("/a.PNG"), binary(b"\xff\xfe"));
        assert!(false_picture.blocks[0].as_text().unwrap().contains("image content (image/png)"));
        let long = show(&asked("/a.bin"), FileAnswer::Binary { base64: String::new(), len: 512_001 });
        assert!(long.is_error());
    }
}
