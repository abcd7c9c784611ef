//! The real `base`: made once from Debian's packages, and what programs expect to find in it.
//!
//! Slow: alone, `cargo nextest run -p tests --test base`. It needs mmdebstrap or debootstrap, and Debian's mirrors.

use fleet::{BASE, Create, ExecRequest};
use testkit::{Bodies, body_test};

/// A package that makes an account and gives it a file, as many do.
const PACKAGE: &str = r#"
    set -e; mkdir -p /tmp/p/DEBIAN /tmp/p/usr/bin; cd /tmp
    printf 'Package: greeting\nVersion: 1\nArchitecture: all\nMaintainer: x <x@x.x>\nDescription: x\n' > p/DEBIAN/control
    printf '#!/bin/sh\nadduser --system --quiet greeter\nchown greeter /usr/bin/greeting\n' > p/DEBIAN/postinst
    printf '#!/bin/sh\necho hello\n' > p/usr/bin/greeting; chmod 755 p/DEBIAN/postinst p/usr/bin/greeting
    dpkg-deb --root-owner-group --build p greeting.deb >/dev/null
    sudo DEBIAN_FRONTEND=noninteractive apt-get install -y /tmp/greeting.deb >/dev/null 2>&1
    greeting; stat -c %U /usr/bin/greeting
"#;

#[body_test(except(user = "a root of its own needs subordinate ids", microvm = "the root is the same; body::templates shows machines on roots of their own"))]
async fn base_is_what_programs_expect(t: Bodies) {
    let made = t.fleet().setup(BASE, &mut |_| ()).unwrap_or_else(|failure| panic!("{}", testkit::explain(&failure)));
    assert_eq!(t.fleet().setup(BASE, &mut |_| ()).unwrap().builds.len(), made.builds.len(), "it is made once");
    let view = t.make(Create { template: BASE.into(), ..t.kept() }).await;
    let login = |line: &str| ExecRequest::new(["/bin/bash", "-l", "-c", line]);
    let ok = async |line: &str| t.exec(view.id(), login(line)).await.ok();
    assert_eq!(ok("id -un; id -u; pwd; sudo id -u").await, "user\n1000\n/home/user\n0");
    assert_eq!(ok("for name in bash python python3 pip node npm git curl sudo; do command -v $name >/dev/null || echo no $name; done").await, "");
    assert_eq!(ok("python -c 'import ssl, sqlite3, venv; print(1 + 1)'; node -e 'console.log(2 + 2)'; locale charmap").await, "2\n4\nUTF-8");
    assert_eq!(ok("cat /proc/self/uid_map | (read a b c; echo $a $c)").await, "0 65536");
    assert_eq!(ok(PACKAGE).await, "hello\ngreeter");
    assert_eq!(ok("git config --global user.email a@b && git config --global user.name a && git init -q r && cd r && touch f && git add f && git commit -qm x && git log --oneline | wc -l").await, "1");
}
