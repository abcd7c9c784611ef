//! Files through the guest, as a caller sees them.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use std::{
    ffi::OsStr,
    fs,
    os::unix::{ffi::OsStrExt, fs::PermissionsExt},
};

use common::{TestGuest, request};
use http_body_util::BodyExt;
use proto::tree::{TreeItem, TreeReader};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

const OCTETS: [(&str, &str); 1] = [("content-type", "application/octet-stream")];

fn uri(guest: &TestGuest, name: &str) -> String {
    format!("/files?path={}/{name}", guest.dir.display())
}

#[tokio::test]
async fn bytes_go_in_and_come_out() {
    let guest = TestGuest::start();
    let path = guest.dir.join("a b/c");
    let (status, answer) = guest.ask_with("POST", &uri(&guest, "a+b/c"), &OCTETS, "hello").await;
    let wanted = json!([{"path": path, "name": "c", "type": "file"}]);
    assert_eq!((status, serde_json::from_slice::<Value>(&answer).unwrap()), (200, wanted));
    assert_eq!(guest.ask("GET", &uri(&guest, "a%20b/c"), "").await, (200, "hello".into()));
    let ranged = guest.ask_with("GET", &uri(&guest, "a+b/c"), &[("range", "bytes=1-3")], "").await;
    assert_eq!(ranged, (206, "ell".into()));
    assert_eq!(guest.ask_with("GET", &uri(&guest, "a+b/c"), &[("range", "bytes=9-")], "").await.0, 416);
    assert_eq!(fs::metadata(guest.dir.join("a b")).unwrap().permissions().mode() & 0o777, 0o755);
    let large = vec![7_u8; 3 << 20];
    assert_eq!(guest.ask_with("POST", &uri(&guest, "large"), &OCTETS, large.clone()).await.0, 200);
    assert_eq!(guest.ask("GET", &uri(&guest, "large"), "").await, (200, large.into()));
}

#[tokio::test]
async fn an_upload_that_breaks_off_changes_nothing() {
    let guest = TestGuest::start();
    let (new, old) = (guest.dir.join("new"), guest.dir.join("old"));
    fs::write(&old, "what was there").unwrap();
    let inode = std::os::unix::fs::MetadataExt::ino(&fs::metadata(&old).unwrap());
    let entries = fs::read_dir(&guest.dir).unwrap().count();
    let first = vec![7_u8; 1 << 20];
    for path in [&new, &old] {
        use tokio::io::AsyncWriteExt;
        let name = path.file_name().unwrap().to_str().unwrap();
        let mut stream = guest.connect().await;
        let head = format!(
            "POST {} HTTP/1.1\r\nhost: guest\r\ncontent-type: application/octet-stream\r\ncontent-length: 9000000\r\n\r\n",
            uri(&guest, name)
        );
        stream.write_all(head.as_bytes()).await.unwrap();
        stream.write_all(&first).await.unwrap();
        // More was written than a socket buffer holds, so the upload has begun.
        if path == &new {
            guest.wait_for("it is there", || new.exists());
        }
        drop(stream);
    }
    guest.wait_for("the new one is gone", || !new.exists());
    assert_eq!(fs::read(&old).unwrap(), b"what was there");
    // A replacement that completes: shorter, longer, and with the inode that other processes have open.
    for contents in [b"short".to_vec(), vec![9; 3 << 20]] {
        assert_eq!(guest.ask_with("POST", &uri(&guest, "old"), &OCTETS, contents.clone()).await.0, 200);
        assert!(fs::read(&old).unwrap() == contents);
    }
    assert_eq!(std::os::unix::fs::MetadataExt::ino(&fs::metadata(&old).unwrap()), inode);
    assert_eq!(fs::read_dir(&guest.dir).unwrap().count(), entries, "nothing is left beside");
}

#[tokio::test]
async fn gzip_goes_both_ways() {
    use std::io::{Read, Write};
    let guest = TestGuest::start();
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    encoder.write_all(&b"zip".repeat(1000)).unwrap();
    let headers = [OCTETS[0], ("content-encoding", "gzip")];
    let zipped = encoder.finish().unwrap();
    assert_eq!(guest.ask_with("POST", &uri(&guest, "z"), &headers, zipped).await.0, 200);
    assert_eq!(fs::read(guest.dir.join("z")).unwrap(), b"zip".repeat(1000));
    let (status, body) = guest.ask_with("GET", &uri(&guest, "z"), &[("accept-encoding", "gzip")], "").await;
    let mut text = Vec::new();
    flate2::read::GzDecoder::new(&body[..]).read_to_end(&mut text).unwrap();
    assert_eq!((status, text), (200, b"zip".repeat(1000)));
    assert_eq!(guest.ask_with("POST", &uri(&guest, "bad"), &headers, "not gzip at all").await.0, 400);
    assert_eq!(
        guest.ask_with("GET", &uri(&guest, "z"), &[("accept-encoding", "identity;q=0")], "").await.0,
        406
    );
}

#[tokio::test]
async fn a_form_holds_several_files_and_each_path_once() {
    let guest = TestGuest::start();
    let part = |name: &str, text: &str| {
        format!(
            "--XX\r\nContent-Disposition: form-data; name=\"file\"; filename=\"{name}\"\r\n\r\n{text}\r\n"
        )
    };
    let headers = [("content-type", "multipart/form-data; boundary=XX")];
    let dir = guest.dir.display();
    let form = format!(
        "{}{}--XX--\r\n",
        part(&format!("{dir}/m/1"), "one"),
        part(&format!("{dir}/m/sub ž/2"), "two")
    );
    let (status, answer) = guest.ask_with("POST", "/files", &headers, form).await;
    let names: Vec<Value> = serde_json::from_slice::<Vec<Value>>(&answer).unwrap();
    assert_eq!((status, names.len()), (200, 2));
    assert_eq!(fs::read_to_string(guest.dir.join("m/sub ž/2")).unwrap(), "two");
    let form = format!("{}{}--XX--\r\n", part(&format!("{dir}/d"), "one"), part(&format!("{dir}/d"), "two"));
    let (status, answer) = guest.ask_with("POST", "/files", &headers, form).await;
    assert_eq!(status, 400, "{answer:?}");
    assert_eq!(guest.ask_with("POST", "/files", &headers, "--XX\r\nbroken").await.0, 400);
    assert_eq!(guest.ask_with("POST", "/files", &[("content-type", "text/plain")], "x").await.0, 400);
}

#[tokio::test]
async fn what_is_not_a_file_is_refused_at_once() {
    let guest = TestGuest::start();
    rustix::fs::mkfifoat(rustix::fs::CWD, guest.dir.join("fifo"), rustix::fs::Mode::RWXU).unwrap();
    for (name, status) in [("fifo", 400), ("socket", 400), ("", 400), ("none", 404), ("config.json/x", 404)] {
        assert_eq!(guest.ask("GET", &uri(&guest, name), "").await.0, status, "{name}");
    }
    std::os::unix::fs::symlink("loop", guest.dir.join("loop")).unwrap();
    std::os::unix::fs::symlink("there", guest.dir.join("back")).unwrap();
    std::os::unix::fs::symlink("back", guest.dir.join("there")).unwrap();
    let long = "x".repeat(300);
    for name in ["loop", "back", "there/below", &long] {
        assert_eq!(guest.ask("GET", &uri(&guest, name), "").await.0, 400, "{name}");
        assert_eq!(guest.ask_with("POST", &uri(&guest, name), &OCTETS, "x").await.0, 400, "{name}");
    }
    assert_eq!(guest.ask("GET", "/files?path=/dev/zero", "").await.0, 400);
    assert_eq!(guest.ask("GET", "/files?path=/a%00b", "").await.0, 400);
    assert_eq!(guest.ask_with("POST", &uri(&guest, "fifo"), &OCTETS, "x").await.0, 400);
    assert_eq!(guest.ask("GET", "/files?path=/x&username=nobody-here", "").await.0, 401);
    // Files that report the wrong size: zero, or one page.
    assert!(guest.ask("GET", "/files?path=/proc/self/status", "").await.1.starts_with(b"Name:\tpal-guest"));
    let (status, body) =
        guest.ask("GET", "/files?path=/sys/kernel/mm/transparent_hugepage/enabled", "").await;
    assert!(status == 404 || status == 200 && body.len() < 100);
}

#[tokio::test]
async fn who_sends_everything_before_it_listens_hears_why_it_was_refused() {
    let (open, closed) = (TestGuest::start(), TestGuest::start_with(json!({"token": "tok"})));
    for (guest, asked) in [
        (&open, "POST /files?path=/proc/none/x"),
        (&open, "PUT /v1/tree?path=/proc/none/x"),
        (&open, "POST /process.Process/None"),
        (&open, "POST /process.Process/List"),
        (&open, "PUT /filesystem.Filesystem/Stat"),
        (&open, "POST /none"),
        (&closed, "POST /files?path=/x"),
        (&closed, "POST /process.Process/Start"),
        (&closed, "POST /filesystem.Filesystem/Stat"),
    ] {
        let mut stream = guest.connect().await;
        let (piece, pieces) = ([7; 64 << 10], 256);
        let head = format!(
            "{asked} HTTP/1.1\r\nhost: x\r\ncontent-type: application/octet-stream\r\ncontent-length: {}\r\n\r\n",
            piece.len() * pieces
        );
        stream.write_all(head.as_bytes()).await.unwrap();
        for _ in 0..pieces {
            stream.write_all(&piece).await.unwrap_or_else(|error| panic!("{asked} is not read on: {error}"));
        }
        let mut said = [0; 12];
        stream.read_exact(&mut said).await.unwrap();
        let said = String::from_utf8_lossy(&said).into_owned();
        assert!(said.starts_with("HTTP/1.1 4") || said.starts_with("HTTP/1.1 5"), "{asked}: {said}");
    }
}

#[tokio::test]
async fn directories_are_made_listed_moved_and_removed() {
    let guest = TestGuest::start();
    let call = async |method: &str, message: Value| {
        guest.call(&format!("filesystem.Filesystem/{method}"), message).await
    };
    let path = |name: &str| guest.dir.join(name).to_str().unwrap().to_owned();
    let (status, made) = call("MakeDir", json!({"path": path("d/e")})).await;
    assert_eq!((status, &made["entry"]["type"]), (200, &json!("FILE_TYPE_DIRECTORY")));
    assert_eq!(call("MakeDir", json!({"path": path("d/e")})).await.1["code"], "already_exists");
    fs::write(guest.dir.join("d/f"), "text").unwrap();
    std::os::unix::fs::symlink("f", guest.dir.join("d/l")).unwrap();
    assert_eq!(call("MakeDir", json!({"path": path("d/f")})).await.1["code"], "invalid_argument");
    let (_, list) = call("ListDir", json!({"path": path("d")})).await;
    let names: Vec<_> =
        list["entries"].as_array().unwrap().iter().map(|entry| entry["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["e", "f", "l"]);
    let link = &list["entries"][2];
    assert_eq!(link["symlinkTarget"], fs::canonicalize(guest.dir.join("d/f")).unwrap().to_str().unwrap());
    assert_eq!((&link["type"], &link["permissions"]), (&json!("FILE_TYPE_FILE"), &json!("Lrwxrwxrwx")));
    assert_eq!(call("ListDir", json!({"path": path("d/f")})).await.1["code"], "invalid_argument");
    assert_eq!(call("ListDir", json!({"path": path("none")})).await.1["code"], "not_found");
    let (_, moved) = call("Move", json!({"source": path("d"), "destination": path("new/d")})).await;
    assert_eq!(moved["entry"]["path"], path("new/d"));
    assert_eq!(
        call("Move", json!({"source": path("d"), "destination": path("x")})).await.1["code"],
        "not_found"
    );
    assert_eq!(call("Stat", json!({"path": path("new/d/f")})).await.1["entry"]["size"], "4");
    assert_eq!(call("Remove", json!({"path": path("new")})).await, (200, json!({})));
    assert_eq!(call("Remove", json!({"path": path("new")})).await, (200, json!({})));
    assert_eq!(call("Stat", json!({"path": path("new")})).await.1["code"], "not_found");
    assert_eq!(call("Stat", json!({"path": "x".repeat(5000)})).await.1["code"], "invalid_argument");
}

#[tokio::test]
async fn watches_tell_what_happens() {
    let guest = TestGuest::start();
    let dir = guest.dir.join("w");
    fs::create_dir(&dir).unwrap();
    let asked = json!({"path": dir, "recursive": true, "includeEntry": true});
    let mut events = guest.stream("filesystem.Filesystem/WatchDir", asked.clone()).await;
    assert_eq!(events.message().await, json!({"start": {}}));
    let (_, created) = guest.call("filesystem.Filesystem/CreateWatcher", asked).await;
    fs::create_dir(dir.join("sub")).unwrap();
    let told = events.message().await["filesystem"].clone();
    assert_eq!((&told["name"], &told["type"]), (&json!("sub"), &json!("EVENT_TYPE_CREATE")));
    assert_eq!(told["entry"]["type"], "FILE_TYPE_DIRECTORY");
    fs::write(dir.join("sub/f"), "x").unwrap();
    let told = events.message().await["filesystem"].clone();
    assert_eq!((&told["name"], &told["type"]), (&json!("sub/f"), &json!("EVENT_TYPE_CREATE")));
    let mut polled = Vec::new();
    while !polled.contains(&json!("sub/f")) {
        let (status, more) = guest.call("filesystem.Filesystem/GetWatcherEvents", created.clone()).await;
        assert_eq!(status, 200);
        polled.extend(more["events"].as_array().into_iter().flatten().map(|event| event["name"].clone()));
    }
    assert_eq!(guest.call("filesystem.Filesystem/RemoveWatcher", created.clone()).await, (200, json!({})));
    assert_eq!(guest.call("filesystem.Filesystem/GetWatcherEvents", created).await.0, 404);
    let missing =
        guest.stream("filesystem.Filesystem/WatchDir", json!({"path": "/no/such"})).await.rest().await;
    assert_eq!(missing.last["error"]["code"], "not_found");
}

#[tokio::test]
async fn trees_go_out_and_in_again() {
    let guest = TestGuest::start();
    let from = guest.dir.join("from");
    fs::create_dir_all(from.join("deep/er")).unwrap();
    fs::write(from.join(OsStr::from_bytes(b"deep/\xff")), vec![1_u8; 600_000]).unwrap();
    std::os::unix::fs::symlink("/etc/passwd", from.join("link")).unwrap();
    let tree = async |path: String| {
        let reply = guest.send(request("GET", &format!("/v1/tree?path={path}"), &[], "".into())).await;
        assert_eq!(reply.status(), 200);
        reply.into_body().collect().await.unwrap().to_bytes()
    };
    let sent = tree(from.display().to_string()).await;
    let to = guest.dir.join("to");
    // A path that is not UTF-8, percent-encoded.
    let uri = format!("/v1/tree?path={}/%FEx", to.display());
    let (status, answer) = guest.ask("PUT", &uri, sent.clone()).await;
    assert_eq!((status, &answer[..]), (200, &br#"{"entries":5,"bytes":600000}"#[..]));
    let there = to.join(OsStr::from_bytes(b"\xfex"));
    assert_eq!(fs::read(there.join(OsStr::from_bytes(b"deep/\xff"))).unwrap().len(), 600_000);
    assert_eq!(fs::read_link(there.join("link")).unwrap().to_str(), Some("/etc/passwd"));
    let mut reader = TreeReader::default();
    reader.push(&tree(format!("{}/%FEx/deep/%FF", to.display())).await);
    assert_eq!(reader.next().unwrap(), Some(TreeItem::File { path: vec![], mode: 0o644 }));
    assert_eq!(guest.ask("GET", "/v1/tree?path=/no/such", "").await.0, 404);
    assert_eq!(guest.ask("PUT", &uri, "PALTREE2").await.0, 400);
    assert_eq!(guest.ask("PUT", &uri, sent.slice(..100)).await.0, 400);
}

#[tokio::test]
async fn metadata_stays_with_a_file_until_the_next_upload() {
    let guest = TestGuest::start();
    let headers = [OCTETS[0], ("x-metadata-author", "me")];
    let (_, answer) = guest.ask_with("POST", &uri(&guest, "m"), &headers, "x").await;
    let answer: Value = serde_json::from_slice(&answer).unwrap();
    // A file system without attributes keeps the file and reports no metadata.
    if answer[0]["metadata"] == json!({"author": "me"}) {
        let stat = json!({"path": guest.dir.join("m")});
        let (_, found) = guest.call("filesystem.Filesystem/Stat", stat.clone()).await;
        assert_eq!(found["entry"]["metadata"], json!({"author": "me"}));
        guest.ask_with("POST", &uri(&guest, "m"), &OCTETS, "y").await;
        let (_, found) = guest.call("filesystem.Filesystem/Stat", stat).await;
        assert_eq!(found["entry"]["metadata"], Value::Null);
    }
}
