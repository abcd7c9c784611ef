//! What a Body sees of the host by name: that, with the access that was said, and nothing beside it.

use std::fs;

use proto::spec::{Access, Mount};
use testkit::{Bodies, body_test};

fn mount(t: &Bodies, name: &str, target: &str, access: Access) -> Mount {
    Mount { source: t.dir().join(name), target: target.into(), access }
}

/// A directory that everybody may write, so that only the mount can say no.
fn furnish(t: &Bodies, name: &str) {
    let dir = t.dir().join(name);
    fs::create_dir(&dir).unwrap();
    fs::write(dir.join("file"), "of the host\n").unwrap();
    for path in [dir.clone(), dir.join("file")] {
        fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
    }
}

#[body_test(except(microvm = "what a machine sees of the host is shared: tests/microvm/share.rs"))]
async fn a_read_only_mount_is_read_and_never_written(t: Bodies) {
    furnish(&t, "shown");
    furnish(&t, "shared");
    for mut request in [t.passing(), t.kept()] {
        request.mounts.push(mount(&t, "shown", "/mnt/shown", Access::ReadOnly));
        request.mounts.push(mount(&t, "shared", "/mnt/shared", Access::ReadWrite));
        let spec = t.make(request).await.spec;
        let (body, owns) = (spec.id, !spec.ids.has_root());
        assert_eq!(t.sh(&body, "cat /mnt/shown/file").await.ok(), "of the host");
        // Each act is first done where the door is open.
        for act in [
            "echo x > D/new",
            "echo x >> D/file",
            "chmod 755 D/file",
            "mkdir D/dir",
            "mv D/file D/moved",
            "rm -f D/file D/moved",
        ] {
            if act.starts_with("chmod") && !owns {
                continue; // Not the file of the Body's user, whose id is another's on the host.
            }
            t.sh(&body, &act.replace('D', "/mnt/shared")).await.ok();
            let refused = t.sh(&body, &act.replace('D', "/mnt/shown")).await;
            assert!(
                refused.code != 0 && refused.complaint().contains("Read-only file system"),
                "{act}: {refused:?}"
            );
        }
        for name in ["shared/new", "shared/dir"] {
            let path = t.dir().join(name);
            let _ = fs::remove_file(&path).or_else(|_| fs::remove_dir(&path));
        }
        fs::write(t.dir().join("shared/file"), "again").unwrap();
        fs::set_permissions(t.dir().join("shared/file"), std::os::unix::fs::PermissionsExt::from_mode(0o777))
            .unwrap();
    }
    assert_eq!(fs::read_to_string(t.dir().join("shown/file")).unwrap(), "of the host\n");
    assert_eq!(fs::read_dir(t.dir().join("shown")).unwrap().count(), 1);
}

#[body_test(except(microvm = "what a machine sees of the host is shared: tests/microvm/share.rs"))]
async fn what_is_written_to_a_shared_mount_is_on_the_host_and_stays(t: Bodies) {
    furnish(&t, "shared");
    let mut request = t.kept();
    request.mounts.push(mount(&t, "shared", "/mnt/deep/er/shared", Access::ReadWrite));
    let body = t.make(request).await.spec.id;
    t.sh(&body, "cd /mnt/deep/er/shared && echo inside > new && mkdir dir").await.ok();
    assert_eq!(fs::read_to_string(t.dir().join("shared/new")).unwrap(), "inside\n");
    t.fleet().stop(&body, std::time::Duration::ZERO).await.unwrap();
    t.fleet().start(&body).await.unwrap();
    assert_eq!(t.sh(&body, "cat /mnt/deep/er/shared/new").await.ok(), "inside", "also after a restart");
    t.fleet().remove(&body, fleet::Force::Yes).await.unwrap();
    assert_eq!(
        fs::read_to_string(t.dir().join("shared/new")).unwrap(),
        "inside\n",
        "removing a Body removes nothing of the host"
    );
    assert!(t.dir().join("shared/dir").is_dir());
}

#[body_test(except(microvm = "what a machine sees of the host is shared: tests/microvm/share.rs"))]
async fn a_single_file_can_be_shown(t: Bodies) {
    furnish(&t, "shown");
    let mut request = t.passing();
    request.mounts.push(mount(&t, "shown/file", "/etc/of-the-host.conf", Access::ReadOnly));
    let body = t.make(request).await.spec.id;
    assert_eq!(t.sh(&body, "cat /etc/of-the-host.conf; ls /mnt").await.ok(), "of the host");
    assert_ne!(t.sh(&body, "echo x > /etc/of-the-host.conf").await.code, 0);
}

#[body_test(except(microvm = "what a machine sees of the host is shared: tests/microvm/share.rs"))]
async fn devices_and_programs_of_a_mount_have_no_power(t: Bodies) {
    furnish(&t, "shown");
    let tool = t.dir().join("shown/tool");
    fs::copy("/usr/bin/id", &tool).unwrap();
    fs::set_permissions(&tool, std::os::unix::fs::PermissionsExt::from_mode(0o6755)).unwrap();
    let mut request = t.passing();
    request.mounts.push(mount(&t, "shown", "/mnt/shown", Access::ReadOnly));
    let body = t.make(request).await.spec.id;
    assert_eq!(t.sh(&body, "/mnt/shown/tool -u").await.ok(), "1000", "it runs, as whoever runs it");
}

/// A layer in between would cost every access to own files a third, and a mount of its own would tell where it is.
#[body_test(except(microvm = "its root is the overlay of a kernel of its own"))]
async fn a_kept_root_is_a_directory_of_its_disk_and_no_table_tells_which(t: Bodies) {
    let body = t.make(t.kept()).await.spec.id;
    let kind = |path: &std::path::Path| rustix::fs::statfs(path).unwrap().f_type;
    let upper = t.body_dir(&body).join("disk/upper/root");
    assert_eq!(t.sh(&body, "stat -f -c %t /").await.ok(), format!("{:x}", kind(&upper)));
    t.sh(&body, "echo mine > ~/mine").await.ok();
    assert_eq!(fs::read_to_string(upper.join("home/user/mine")).unwrap(), "mine\n");
    for table in ["mountinfo", "mounts", "mountstats"] {
        let table = t.sh(&body, &format!("cat /proc/self/{table}")).await.ok();
        // The control: what is mounted on its disk is told.
        assert!(table.contains(" /etc "), "{table}");
        assert!(!table.contains(&t.data().display().to_string()) && !table.contains("upper/root"), "{table}");
    }
    // Above the root there is the root.
    assert_eq!(
        t.sh(&body, "cd / && cd .. && ls -di . /.. / | awk '{print $1}' | uniq | wc -l").await.ok(),
        "1"
    );
}
