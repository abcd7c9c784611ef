//! The places of an agent's files: Body, store, own log; and the files of middleware.

use brain::agent::{NullSink, middleware::AgentFiles};
use bridge::files::{CompositeFiles, HostAccess, HostDirectory};
use proto::event_data::{AgentPosition, AgentRewound};
use serde_json::json;
use std::sync::Arc;
use testkit::{Bodies, body_test};

use crate::world::ToolWorld;

#[body_test(except(microvm = "the places are on the host"))]
async fn memories_are_shared_by_agents(t: Bodies) {
    let world = ToolWorld::new(&t).await;
    let other = ToolWorld::in_body(&t, world.body.clone(), None, Arc::new(NullSink));
    let path = "/memories/team/style.md";
    assert_eq!(
        world.text("write_file", json!({"file_path": path, "content": "tabs\nand more\n"})).await,
        format!("Updated file {path}")
    );
    assert_eq!(
        other.text("read_file", json!({"file_path": path})).await,
        "@@ lines 1-2 of 2 @@\ntabs\nand more"
    );
    let edit = json!({"file_path": path, "old_string": "tabs", "new_string": "spaces"});
    assert_eq!(
        other.text("edit_file", edit).await,
        format!("Successfully replaced 1 instance(s) of the string in '{path}'")
    );
    assert_eq!(world.text("ls", json!({"path": "/memories"})).await, "['/memories/team/']");
    assert_eq!(
        world.text("glob", json!({"pattern": "*.md", "path": "/memories"})).await,
        format!("['{path}']")
    );
    assert_eq!(
        world
            .text("grep", json!({"pattern": "spaces", "path": "/memories/team", "output_mode": "content"}))
            .await,
        format!("{path}:\n  1: spaces")
    );
    assert_eq!(
        world.error("read_file", json!({"file_path": "/memories/none"})).await,
        "Error: File '/memories/none': file_not_found"
    );
    // The shell sees nothing of it: it is no directory of the Body.
    assert!(world.text("execute", json!({"command": "ls /memories"})).await.contains("No such file"));
    assert_eq!(world.text("delete", json!({"file_path": "/memories/team"})).await, "Deleted /memories/team");
    assert_eq!(other.error("delete", json!({"file_path": path})).await, format!("Error: '{path}' not found"));
    let long = "x".repeat((256 << 10) + 1);
    let refused = world.error("write_file", json!({"file_path": path, "content": long})).await;
    assert!(
        refused.starts_with(&format!("Failed to write file '{path}': the file has 262145 bytes")),
        "{refused}"
    );
}

#[body_test(except(microvm = "the places are on the host"))]
async fn own_files_follow_forks_and_rewinds(t: Bodies) {
    let world = ToolWorld::new(&t).await;
    let write = |text: &str| json!({"file_path": "/agent/notes.md", "content": text});
    let read = json!({"file_path": "/agent/notes.md"});
    world.call("write_file", write("first\n")).await;
    let seq = bridge::Agents::new(world.fleet.clone()).load(world.agent()).await.unwrap().view.seq;
    world.call("write_file", write(&"second\n".repeat(40_000))).await;
    assert!(
        world
            .text("read_file", read.clone())
            .await
            .starts_with("@@ lines 1-100 of 40000 | next offset 100 @@\nsecond\n")
    );
    let origin = AgentPosition { agent: world.agent().clone(), through: seq };
    let fork = ToolWorld::in_body(&t, world.body.clone(), Some(origin), Arc::new(NullSink));
    assert_eq!(fork.text("read_file", read.clone()).await, "@@ lines 1-1 of 1 @@\nfirst");
    let edit = json!({"file_path": "/agent/notes.md", "old_string": "first", "new_string": "forked"});
    fork.call("edit_file", edit).await;
    assert_eq!(fork.text("read_file", read.clone()).await, "@@ lines 1-1 of 1 @@\nforked");
    world.note([AgentRewound { through: seq, turn: 0 }.into()]);
    assert_eq!(world.text("read_file", read.clone()).await, "@@ lines 1-1 of 1 @@\nfirst");
    assert_eq!(world.reopen(&t).text("read_file", read.clone()).await, "@@ lines 1-1 of 1 @@\nfirst");
    assert_eq!(
        world.text("delete", json!({"file_path": "/agent/notes.md"})).await,
        "Deleted /agent/notes.md"
    );
    assert_eq!(world.error("read_file", read).await, "Error: File '/agent/notes.md': file_not_found");
}

#[body_test(except(microvm = "the places are on the host"))]
async fn one_tree_shows_all_places(t: Bodies) {
    let world = ToolWorld::new(&t).await;
    world.call("write_file", json!({"file_path": "/memories/m.md", "content": "needle\n"})).await;
    world.call("write_file", json!({"file_path": "/agent/a.md", "content": "needle\n"})).await;
    world.call("write_file", json!({"file_path": "/home/user/b.md", "content": "needle\n"})).await;
    let root = world.text("ls", json!({"path": "/"})).await;
    for name in ["'/memories/'", "'/agent/'", "'/home'", "'/tmp'"] {
        assert!(root.contains(name), "{name} in {root}");
    }
    assert_eq!(
        world.text("grep", json!({"pattern": "needle", "glob": "*.md"})).await,
        "/agent/a.md\n/home/user/b.md\n/memories/m.md"
    );
    assert_eq!(
        world.text("glob", json!({"pattern": "*.md"})).await,
        "['/agent/a.md', '/home/user/b.md', '/memories/m.md']"
    );
    assert_eq!(world.text("glob", json!({"pattern": "/memories/*.md"})).await, "['/memories/m.md']");
}

#[body_test(except(microvm = "the places are on the host"))]
async fn middleware_reads_writes_and_lists(t: Bodies) {
    let world = ToolWorld::new(&t).await;
    for directory in ["/tmp/palisade-agent", "/memories", "/agent"] {
        let path = format!("{directory}/sub/x.txt");
        assert_eq!(world.files.read(&path).await, Ok(None));
        assert_eq!(world.files.list(directory).await, Ok(Vec::new()));
        world.files.write(&path, "one\ntwo").await.unwrap();
        assert_eq!(world.files.read(&path).await.unwrap().as_deref(), Some("one\ntwo"));
        assert_eq!(world.files.list(directory).await, Ok(vec!["sub/".to_owned()]));
        assert_eq!(world.files.list(&format!("{directory}/sub")).await, Ok(vec!["x.txt".to_owned()]));
    }
    assert!(world.files.write("/proc/none/x", "a").await.is_err());
    // A result that is longer than a call may write keeps its ends.
    let long = format!("first\n{}\nlast", "é".repeat(6 << 20));
    world.files.write("/tmp/palisade-agent/long", &long).await.unwrap();
    let kept = t.sh(&world.body, "head -n 1 /tmp/palisade-agent/long; tail -n 1 /tmp/palisade-agent/long; grep -c 'bytes truncated' /tmp/palisade-agent/long").await.ok();
    assert_eq!(kept, "first\nlast1");
}

#[body_test(except(microvm = "the places are on the host"))]
async fn a_directory_of_the_host_is_read_and_nothing_else(t: Bodies) {
    let docs = t.dir().join("docs");
    std::fs::create_dir_all(docs.join("deep")).unwrap();
    std::fs::write(docs.join("deep/a.md"), "guide\n").unwrap();
    std::fs::write(t.dir().join("secret"), "s").unwrap();
    std::os::unix::fs::symlink("../secret", docs.join("out")).unwrap();
    let place = HostDirectory::open(&docs, HostAccess::ReadOnly).unwrap();
    let files = CompositeFiles::new(Arc::new(place.clone()), "/").with_route("/docs/", Arc::new(place));
    assert_eq!(files.read("/docs/deep/a.md").await.unwrap().as_deref(), Some("guide\n"));
    assert!(files.read("/docs/out").await.unwrap_err().contains("permission_denied"));
    assert!(files.write("/docs/new", "x").await.unwrap_err().contains("permission_denied"));
    assert!(HostDirectory::open(&t.dir().join("none"), HostAccess::ReadOnly).is_err());
}
