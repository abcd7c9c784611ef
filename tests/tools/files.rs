//! Tools on files. The texts were printed by Deep Agents 0.7.32 for the same calls.

use brain::model::ResultBlock;
use proto::event_data::{CallRisk, CallVenue};
use serde_json::json;
use testkit::{Bodies, body_test};

use crate::world::ToolWorld;

#[body_test(except(microvm = "the guest's own tests cover file calls there"))]
async fn files_are_written_read_edited_and_deleted(t: Bodies) {
    let world = ToolWorld::new(&t).await;
    let path = "/home/user/a b/c.txt";
    let write = json!({"file_path": path, "content": "x\n\ny\n"});
    assert_eq!(world.text("write_file", write).await, "Updated file /home/user/a b/c.txt");
    let edit = |old: &str| json!({"file_path": path, "old_string": old, "new_string": "z"});
    assert_eq!(
        world.text("edit_file", edit("x")).await,
        "Successfully replaced 1 instance(s) of the string in '/home/user/a b/c.txt'"
    );
    for (old, expected) in [
        ("", "Error: old_string cannot be empty. Provide the exact text to replace."),
        ("q", "Error: String not found in file: 'q'"),
        ("\n", "Error: String '\n' appears multiple times. Use replace_all=True to replace all occurrences."),
    ] {
        assert_eq!(world.error("edit_file", edit(old)).await, expected);
    }
    assert_eq!(world.text("read_file", json!({"file_path": path})).await, "@@ lines 1-3 of 3 @@\nz\n\ny");
    assert_eq!(
        world.text("read_file", json!({"file_path": path, "limit": 2})).await,
        "@@ lines 1-2 of 3 | next offset 2 @@\nz\n"
    );
    assert_eq!(world.text("ls", json!({"path": "/home/user/a b"})).await, "['/home/user/a b/c.txt']");
    assert_eq!(
        t.sh(&world.body, "cat '/home/user/a b/c.txt'; stat -c %U '/home/user/a b/c.txt'").await.ok(),
        "z\n\ny\nuser"
    );
    assert_eq!(world.text("delete", json!({"file_path": "/home/user/a b"})).await, "Deleted /home/user/a b");
    assert_eq!(world.error("delete", json!({"file_path": path})).await, format!("Error: '{path}' not found"));
}

#[body_test(except(microvm = "the guest's own tests cover file calls there"))]
async fn errors_have_deep_agents_words(t: Bodies) {
    let world = ToolWorld::new(&t).await;
    t.sh(&world.body, "mkdir ~/d; touch ~/f; mkfifo ~/pipe; mkdir -m 555 ~/ro; printf 'vm\\n' > ~/one")
        .await
        .ok();
    for (tool, arguments, expected) in [
        ("ls", json!({"path": "/nope"}), "Error: Path '/nope': path_not_found"),
        ("ls", json!({"path": "/home/user/f"}), "Error: Path '/home/user/f': not_a_directory"),
        ("ls", json!({"path": "../x"}), "Error: Path traversal not allowed: ../x"),
        ("ls", json!({"path": "~/x"}), "Error: Path traversal not allowed: ~/x"),
        (
            "ls",
            json!({"path": "C:/x"}),
            "Error: Windows absolute paths are not supported: C:/x. Please use virtual paths starting with / (e.g., /workspace/file.txt)",
        ),
        (
            "ls",
            json!({}),
            "Error invoking tool 'ls' with kwargs {} with error:\n path: Field required\n Please fix the error and try again.",
        ),
        ("read_file", json!({"file_path": "/nope"}), "Error: File '/nope': file_not_found"),
        ("read_file", json!({"file_path": "/home/user/d"}), "Error: File '/home/user/d': not_a_file"),
        (
            "read_file",
            json!({"file_path": "/home/user/one", "offset": 5}),
            "Error: File '/home/user/one': Line offset 5 exceeds file length (1 lines)",
        ),
        (
            "write_file",
            json!({"file_path": "/home/user/d", "content": "x"}),
            "Failed to write file '/home/user/d': is_directory",
        ),
        (
            "write_file",
            json!({"file_path": "/home/user/ro/x", "content": "x"}),
            "Failed to write file '/home/user/ro/x': permission_denied",
        ),
        (
            "edit_file",
            json!({"file_path": "/nope", "old_string": "a", "new_string": "b"}),
            "Error: File '/nope' not found",
        ),
        (
            "edit_file",
            json!({"file_path": "/home/user/d", "old_string": "a", "new_string": "b"}),
            "Error: '/home/user/d' is not a regular file",
        ),
        ("delete", json!({"file_path": "/nope"}), "Error: '/nope' not found"),
        ("glob", json!({"pattern": "x", "path": "/nope"}), "Error: Path '/nope': path_not_found"),
        (
            "glob",
            json!({"pattern": "x", "path": "/home/user/f"}),
            "Error: Path '/home/user/f': not_a_directory",
        ),
        (
            "glob",
            json!({"pattern": "../x", "path": "/home/user"}),
            "Error: Path '/home/user': invalid_pattern",
        ),
    ] {
        assert_eq!(world.error(tool, arguments.clone()).await, expected, "{tool} {arguments}");
    }
    // A pipe, an endless device: an error, and no waiting.
    for path in ["/home/user/pipe", "/dev/zero", "/proc/self/mem"] {
        let text = world.error("read_file", json!({"file_path": path})).await;
        assert!(text.starts_with(&format!("Error: File '{path}': ")), "{text}");
    }
    assert_eq!(
        world.text("read_file", json!({"file_path": "/home/user/f"})).await,
        "System reminder: File exists but has empty contents"
    );
    assert_eq!(
        world.text("read_file", json!({"file_path": "/home/user/one", "offset": -3})).await,
        "[Requested offset -3 is before the start of the file; read from line 1 instead.]\n@@ lines 1-1 of 1 @@\nvm"
    );
}

#[body_test(except(microvm = "the guest's own tests cover file calls there"))]
async fn names_and_texts_are_found(t: Bodies) {
    let world = ToolWorld::new(&t).await;
    t.sh(
        &world.body,
        "mkdir -p ~/w/src ~/w/.hid; cd ~/w; echo 'let z = 1;' > src/a.rs; echo z > b.txt; echo z > .hid/c.txt; echo q > src/d.rs",
    )
    .await
    .ok();
    let at = "/home/user/w";
    assert_eq!(
        world.text("glob", json!({"pattern": "*.txt", "path": at})).await,
        "['/home/user/w/.hid/c.txt', '/home/user/w/b.txt']"
    );
    assert_eq!(
        world.text("glob", json!({"pattern": "**/*.txt", "path": at})).await,
        "['/home/user/w/b.txt']"
    );
    assert_eq!(world.text("glob", json!({"pattern": "none", "path": at})).await, "No files found");
    // Without a path, the working directory is searched.
    assert_eq!(world.text("glob", json!({"pattern": "w/*.txt"})).await, "['/home/user/w/b.txt']");
    let grep = |more: serde_json::Value| {
        let mut arguments = json!({"pattern": "z", "path": at});
        arguments.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        arguments
    };
    assert_eq!(
        world.text("grep", grep(json!({}))).await,
        "/home/user/w/.hid/c.txt\n/home/user/w/b.txt\n/home/user/w/src/a.rs"
    );
    assert_eq!(
        world.text("grep", grep(json!({"output_mode": "content", "glob": "*.rs"}))).await,
        "/home/user/w/src/a.rs:\n  1: let z = 1;"
    );
    assert_eq!(
        world.text("grep", grep(json!({"output_mode": "count", "glob": "src/*"}))).await,
        "/home/user/w/src/a.rs: 1"
    );
    let capped = world.text("grep", grep(json!({"max_count": 1}))).await;
    assert!(capped.contains("\n\nNote: the search stopped early (it hit its time limit"), "{capped}");
    assert_eq!(world.text("grep", json!({"pattern": "z", "path": "/nope"})).await, "No matches found");
    let hint = world.text("grep", json!({"pattern": "a.*b", "path": at})).await;
    assert!(hint.starts_with("No matches found\n\nNote: grep matches literal text, not regex,"), "{hint}");
}

#[body_test(except(microvm = "the guest's own tests cover file calls there"))]
async fn pictures_come_as_blocks(t: Bodies) {
    let world = ToolWorld::new(&t).await;
    let png =
        "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==";
    t.sh(&world.body, &format!("echo {png} | base64 -d > ~/p.png; head -c 600000 /dev/urandom > ~/big.png; printf '\\377\\376' > ~/x.bin"))
        .await
        .ok();
    let picture = world.call("read_file", json!({"file_path": "/home/user/p.png"})).await;
    let [ResultBlock::Image(image)] = picture.blocks.as_slice() else { panic!("{picture:?}") };
    assert_eq!((image.media_type.as_str(), image.data.as_str()), ("image/png", png));
    assert_eq!(
        world.error("read_file", json!({"file_path": "/home/user/big.png"})).await,
        "Error: File '/home/user/big.png': Binary file exceeds maximum preview size of 512000 bytes"
    );
    assert_eq!(
        world.text("read_file", json!({"file_path": "/home/user/x.bin"})).await,
        "[read_file: /home/user/x.bin was not attached because this model does not support file content (application/octet-stream).]"
    );
}

#[body_test(except(microvm = "no Body is asked"))]
async fn plans_say_risk_place_and_paths(t: Bodies) {
    let world = ToolWorld::new(&t).await;
    let plan = |tool: &str, arguments: serde_json::Value| {
        let plan = world.tools.plan(tool, arguments.as_object().unwrap()).unwrap();
        (plan.risk, plan.venue, plan.writes)
    };
    let none = Vec::<String>::new();
    for (tool, arguments) in [
        ("ls", json!({"path": "/"})),
        ("read_file", json!({"file_path": "/a"})),
        ("glob", json!({"pattern": "*"})),
        ("grep", json!({"pattern": "x"})),
    ] {
        assert_eq!(plan(tool, arguments), (CallRisk::Read, CallVenue::Body, none.clone()), "{tool}");
    }
    let write = plan("write_file", json!({"file_path": "a//b", "content": ""}));
    assert_eq!(write, (CallRisk::Workspace, CallVenue::Body, vec!["/a/b".to_owned()]));
    let memory = plan("write_file", json!({"file_path": "/memories/n.md", "content": ""}));
    assert_eq!(memory, (CallRisk::Workspace, CallVenue::Agent, vec!["/memories/n.md".to_owned()]));
    assert_eq!(plan("execute", json!({"command": "x"})), (CallRisk::Workspace, CallVenue::Body, none));
    let todos = json!({"todos": [{"content": "a", "status": "pending"}]});
    assert_eq!(plan("write_todos", todos).1, CallVenue::Agent);
}
