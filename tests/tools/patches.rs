//! `apply_patch`: the whole patch, or nothing.

use serde_json::json;
use testkit::{Bodies, body_test};

use crate::world::ToolWorld;

#[body_test(except(microvm = "the guest's own tests cover file calls there"))]
async fn a_patch_changes_all_its_files(t: Bodies) {
    let world = ToolWorld::new(&t).await;
    t.sh(&world.body, "mkdir -p ~/src; printf 'def f():\\n    pass\\n' > ~/src/a.py; echo old > ~/gone; printf 'x\\r\\ny\\r\\n' > ~/dos").await.ok();
    let patch = "*** Begin Patch\n*** Update File: src/a.py\n*** Move to: src/b.py\n@@ def f():\n-    pass\n+    return 1\n\
                 *** Add File: /home/user/new/n.txt\n+one\n*** Delete File: gone\n*** Update File: dos\n@@\n x\n-y\n+z\n*** End Patch";
    assert_eq!(
        world.text("apply_patch", json!({"input": patch})).await,
        "Success. Updated the following files:\nA /home/user/new/n.txt\nM src/b.py\nM dos\nD gone\n"
    );
    assert_eq!(
        t.sh(&world.body, "cat src/b.py new/n.txt; od -c dos | head -1; ls").await.ok(),
        "def f():\n    return 1\none\n0000000   x  \\r  \\n   z  \\r  \\n\ndos\nnew\nsrc"
    );
}

#[body_test(except(microvm = "the guest's own tests cover file calls there"))]
async fn a_patch_that_does_not_fit_changes_nothing(t: Bodies) {
    let world = ToolWorld::new(&t).await;
    t.sh(&world.body, "echo a > ~/a; mkdir ~/d; printf '\\377' > ~/raw").await.ok();
    for (body, expected) in [
        (
            "*** Add File: n\n+x\n*** Update File: a\n@@\n-b\n+c",
            "Error: Failed to find expected lines in a:\nb",
        ),
        (
            "*** Add File: n\n+x\n*** Update File: none\n@@\n-b",
            "Error: Failed to update file none: file_not_found",
        ),
        ("*** Add File: n\n+x\n*** Delete File: none", "Error: Failed to delete file none: file_not_found"),
        ("*** Add File: n\n+x\n*** Delete File: d", "Error: Failed to delete file d: is_directory"),
        (
            "*** Add File: n\n+x\n*** Update File: raw\n@@\n+y",
            "Error: Failed to update file raw: not_a_text_file",
        ),
        (
            "*** Add File: n\n+x\n*** Delete File: a\n*** Update File: a\n@@\n+y",
            "Error: Failed to update file a: file_not_found",
        ),
        (
            "*** Add File: n\n+x\n*** Add File: /memories/m\n+y",
            "Error: one call cannot change files of several places; make one call for each of them",
        ),
    ] {
        let input = format!("*** Begin Patch\n{body}\n*** End Patch");
        assert_eq!(world.error("apply_patch", json!({"input": input})).await, expected);
    }
    let text = world.error("apply_patch", json!({"input": "no patch"})).await;
    assert_eq!(text, "Error: Invalid patch: The first line of the patch must be '*** Begin Patch'");
    assert_eq!(t.sh(&world.body, "ls; cat a").await.ok(), "a\nd\nraw\na");
}

#[body_test(except(microvm = "the guest's own tests cover file calls there"))]
async fn a_patch_reaches_the_other_places_of_files(t: Bodies) {
    let world = ToolWorld::new(&t).await;
    let add = "*** Begin Patch\n*** Add File: /memories/n.md\n+one\n*** End Patch";
    assert!(world.text("apply_patch", json!({"input": add})).await.starts_with("Success."));
    let update = "*** Begin Patch\n*** Update File: /memories/n.md\n@@\n-one\n+two\n*** End Patch";
    assert!(world.text("apply_patch", json!({"input": update})).await.starts_with("Success."));
    let read = world.text("read_file", json!({"file_path": "/memories/n.md"})).await;
    assert_eq!(read, "@@ lines 1-1 of 1 @@\ntwo");
}
