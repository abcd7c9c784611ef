//! Puts a Body's work on top of a branch as commits of the user.
//!
//! The work is the difference between two states: the base, and the Body's files now. The commits between them are
//! steps on the way: each keeps its author and message, and the user becomes the committer.
//!
//! Invariant: the tree at the end is the branch plus that difference, whatever the Body's history looks like. If the
//! steps do not lead there, everything becomes one commit.

use crate::{
    LandRequest, LandSelection,
    error::WorkspaceError,
    git::{Git, GitError},
    land::merge,
    land_base::{Landing, is_ancestor},
    refs, review,
};

/// Most commits that are made in one landing.
const COMMITS_MAX: usize = 1000;
/// The author of a commit whose own author has no name that git accepts.
const UNNAMED: &str = "agent";
/// The fields of [`BodyCommit`], each ended by a NUL.
const FORMAT: &str = "--format=tformat:%H%x00%T%x00%P%x00%an%x00%ae%x00%ad%x00%B%x00";
const FIELDS: usize = 7;

/// The commit that a branch would move to.
#[derive(Debug, Clone)]
pub(crate) struct Replay {
    /// The commit.
    pub(crate) to: String,
    /// How many commits the branch gains; 0 if there is nothing to land.
    pub(crate) commits: usize,
    /// Why the Body's commits became one; none if they did not.
    pub(crate) combined: Option<&'static str>,
    /// The tree of the Body's state that is on the branch then; none if only some commits were picked.
    pub(crate) state: Option<String>,
}

/// A state of the Body's files.
#[derive(Debug, Clone)]
struct BodyState {
    commit: String,
    tree: String,
}

/// A commit of a Body.
#[derive(Debug, Clone)]
struct BodyCommit {
    id: String,
    tree: String,
    parents: Vec<String>,
    author: [String; 3],
    message: String,
}

/// One landing: the commit that was reached, and where it began.
struct Replayer<'a> {
    request: &'a LandRequest<'a>,
    git: &'a Git,
    signs: bool,
    /// The commit that was reached, and its tree.
    at: BodyState,
    commits: usize,
}

/// Makes the commits of a landing on top of `start`.
pub(crate) fn replay(request: &LandRequest<'_>, git: &Git, start: &str) -> Result<Replay, WorkspaceError> {
    let user = Git::at(&request.workspace.repository).identity(request.person);
    let signs =
        user.line(["config", "--type=bool", "--get", "commit.gpgsign"]).is_ok_and(|said| said == "true");
    let at = BodyState::of(git, start)?;
    let mut replayer = Replayer { request, git, signs, at, commits: 0 };
    if let LandSelection::Pick(names) = &request.what {
        return replayer.pick(names);
    }
    replayer.replay_all(start)
}

impl Replayer<'_> {
    fn replay_all(&mut self, start: &str) -> Result<Replay, WorkspaceError> {
        let (git, saved) = (self.git, self.request.saved);
        let landing = Landing::find(git, self.request.body, start, &saved.origin)?;
        let (from, base) = match landing {
            Some(landing) => (landing.head, landing.state),
            None => (saved.origin.clone(), saved.base.clone()),
        };
        let (from, base) = (BodyState::of(git, &from)?, BodyState::of(git, &base)?);
        let end = match self.request.what {
            LandSelection::Committed => commit_on_base(git, &from, &base, &BodyState::of(git, &saved.head)?)?
                .ok_or_else(|| {
                    WorkspaceError::Conflict(
                        "its commits and the uncommitted work below them cannot be separated".into(),
                    )
                })?,
            _ => BodyState::of(git, &saved.wip)?,
        };
        let goal = merge_states(git, &base, &self.at, &end)?;
        let contained =
            || is_ancestor(git, &end.commit, start) && is_ancestor(git, &from.commit, &saved.head);
        if goal == self.at.tree || start != from.commit && contained() {
            return Ok(self.finish(None, &end));
        }
        if matches!(self.request.what, LandSelection::Squash { .. }) {
            return self.combine(&goal, &end, None);
        }
        let commits = commits_of(git, &saved.head, &[&from.commit, start])?;
        let begin = self.at.clone();
        let why = match self.steps(&commits, &from, &base, &end, &goal)? {
            None => return Ok(self.finish(None, &end)),
            Some(why) => why,
        };
        (self.at, self.commits) = (begin, 0);
        self.combine(&goal, &end, Some(why))
    }

    /// Makes a commit for each step; returns why the steps do not lead to the goal.
    fn steps(
        &mut self,
        commits: &[BodyCommit],
        from: &BodyState,
        base: &BodyState,
        end: &BodyState,
        goal: &str,
    ) -> Result<Option<&'static str>, WorkspaceError> {
        let mut state = base.clone();
        if commits.iter().any(|commit| commit.parents.len() > 1) {
            let exact = self.at.commit == from.commit && from.tree == base.tree;
            if !exact || !is_ancestor(self.git, &from.commit, &self.request.saved.head) {
                return Ok(Some("the Body's history has merges"));
            }
            self.rewrite(commits)?;
            state.tree.clone_from(&self.at.tree);
        } else {
            for commit in commits {
                let made = BodyState { commit: commit.id.clone(), tree: commit.tree.clone() };
                let Some(next) = commit_on_base(self.git, from, base, &made)? else {
                    return Ok(Some("its commits build on uncommitted work"));
                };
                match merge_states(self.git, &state, &self.at, &next) {
                    Ok(tree) => self.add(commit, tree)?,
                    Err(WorkspaceError::Conflict(_)) => {
                        return Ok(Some("a commit conflicts with the branch, and a later one resolves that"));
                    }
                    Err(error) => return Err(error),
                }
                state = next;
            }
        }
        if self.at.tree == goal {
            return Ok(None);
        }
        if state.tree == end.tree {
            return Ok(Some("the branch has some of its changes already"));
        }
        let message = match &self.request.what {
            LandSelection::AllWithMessage(message) => message.clone(),
            _ if self.request.saved.uncommitted => format!("uncommitted work of Body {}", self.request.body),
            _ => format!("work of Body {}", self.request.body),
        };
        let git = self.git.clone();
        self.commit(&git, goal.to_owned(), None, &message)?;
        Ok(None)
    }

    /// Makes one commit of everything.
    fn combine(
        &mut self,
        goal: &str,
        end: &BodyState,
        why: Option<&'static str>,
    ) -> Result<Replay, WorkspaceError> {
        let (request, git) = (self.request, self.git.clone());
        let message = match &request.what {
            LandSelection::Squash { message: Some(message) } | LandSelection::AllWithMessage(message) => {
                message.clone()
            }
            _ => {
                let commits = review::log(&git, &request.saved.origin, &request.saved.head)?;
                let subjects: String = commits
                    .iter()
                    .rev()
                    .map(|commit| format!("- {}\n", proto::text::visible(&commit.subject)))
                    .collect();
                format!("work of Body {}\n\n{subjects}", request.body)
            }
        };
        self.commit(&git, goal.to_owned(), None, &message)?;
        Ok(self.finish(why, end))
    }

    fn finish(&self, combined: Option<&'static str>, end: &BodyState) -> Replay {
        let (to, commits) = (self.at.commit.clone(), self.commits);
        Replay { to, commits, combined, state: Some(end.tree.clone()) }
    }

    /// Makes each commit again with its own tree and parents, merges included. The branch is where they begin.
    fn rewrite(&mut self, commits: &[BodyCommit]) -> Result<(), WorkspaceError> {
        let mut made = std::collections::BTreeMap::<&str, String>::new();
        for commit in commits {
            let parents: Vec<String> = commit
                .parents
                .iter()
                .map(|parent| made.get(parent.as_str()).unwrap_or(parent).clone())
                .collect();
            let author = commit.authored(self.git);
            self.commit(&author, commit.tree.clone(), Some(&parents), &commit.message)?;
            made.insert(&commit.id, self.at.commit.clone());
        }
        Ok(())
    }

    /// Cherry-picks the commits that the user named.
    fn pick(&mut self, names: &[String]) -> Result<Replay, WorkspaceError> {
        let own = own_commits(self.request, self.git)?;
        for name in names {
            let mut found = own.lines().filter(|id| name.len() >= 4 && id.starts_with(name.as_str()));
            let (Some(id), None) = (found.next(), found.next()) else {
                let name = proto::text::visible(name);
                return Err(WorkspaceError::NotFound(format!("the Body has no commit {name:?}")));
            };
            let Some(commit) = commit_named(self.git, id)? else {
                return Err(GitError::Answer("log").into());
            };
            let parent = match commit.parents.first() {
                Some(parent) => BodyState::of(self.git, parent)?,
                None => wrap_tree(self.git, &self.git.line(["mktree"])?)?,
            };
            let made = BodyState { commit: commit.id.clone(), tree: commit.tree.clone() };
            let tree = merge_states(self.git, &parent, &self.at, &made)?;
            self.add(&commit, tree)?;
        }
        Ok(Replay { to: self.at.commit.clone(), commits: self.commits, combined: None, state: None })
    }

    /// Makes a commit with the author and the message of the Body's; none if the branch has the change already.
    fn add(&mut self, commit: &BodyCommit, tree: String) -> Result<(), WorkspaceError> {
        if tree == self.at.tree {
            return Ok(());
        }
        let author = commit.authored(self.git);
        self.commit(&author, tree, None, &commit.message)
    }

    /// Makes a commit on top of the one that was reached, or with these parents.
    fn commit(
        &mut self,
        git: &Git,
        tree: String,
        parents: Option<&[String]>,
        message: &str,
    ) -> Result<(), WorkspaceError> {
        let mut args = vec!["commit-tree", &tree];
        let reached = [self.at.commit.clone()];
        for parent in parents.unwrap_or(&reached) {
            args.extend(["-p", parent]);
        }
        if self.signs {
            args.push("-S");
        }
        let said = git.feed(args, message.as_bytes().to_vec())?;
        let commit = String::from_utf8_lossy(&said).trim_end().to_owned();
        self.at = BodyState { commit, tree };
        self.commits += 1;
        Ok(())
    }
}

impl BodyState {
    fn of(git: &Git, commit: &str) -> Result<Self, WorkspaceError> {
        let tree = git.line(["rev-parse", "--verify", "--quiet", &format!("{commit}^{{tree}}")])?;
        Ok(Self { commit: commit.to_owned(), tree })
    }
}

impl BodyCommit {
    /// git with this commit's author.
    fn authored(&self, git: &Git) -> Git {
        let [name, email, date] = &self.author;
        let crud = |c: char| c.is_control() || c.is_whitespace() || ".,:;<>\"\\'".contains(c);
        let name = if name.chars().all(crud) { UNNAMED } else { name };
        git.clone()
            .env("GIT_AUTHOR_NAME", name)
            .env("GIT_AUTHOR_EMAIL", email)
            .env("GIT_AUTHOR_DATE", format!("@{date}"))
    }

    fn parse(fields: &[&[u8]]) -> Option<Self> {
        let text = |field: &[u8]| String::from_utf8_lossy(field).into_owned();
        let [id, tree, parents, name, email, date, message] = fields else { return None };
        Some(Self {
            id: text(id.trim_ascii_start()),
            tree: text(tree),
            parents: text(parents).split_whitespace().map(str::to_owned).collect(),
            author: [text(name), text(email), text(date)],
            message: text(message),
        })
    }
}

/// The commits of `head` that `known` lacks, oldest first.
fn commits_of(git: &Git, head: &str, known: &[&str]) -> Result<Vec<BodyCommit>, WorkspaceError> {
    let limit = format!("--max-count={}", COMMITS_MAX + 1);
    let found = log(git, &[&["--reverse", "--topo-order", &limit, head, "--not"], known].concat())?;
    if found.len() > COMMITS_MAX {
        return Err(WorkspaceError::Hostile(format!(
            "the Body has more than {COMMITS_MAX} commits, too many to land one by one"
        )));
    }
    Ok(found)
}

fn commit_named(git: &Git, id: &str) -> Result<Option<BodyCommit>, WorkspaceError> {
    Ok(log(git, &["--max-count=1", id])?.pop())
}

fn log(git: &Git, which: &[&str]) -> Result<Vec<BodyCommit>, WorkspaceError> {
    let args = ["log", "--no-show-signature", "--no-color", "--encoding=UTF-8", "--date=raw", FORMAT];
    let said = git.run(args.iter().chain(which).chain(&["--"]))?;
    let fields: Vec<&[u8]> = said.split(|byte| *byte == 0).collect();
    let commits = fields.chunks_exact(FIELDS).map(BodyCommit::parse);
    commits.collect::<Option<_>>().ok_or_else(|| GitError::Answer("log").into())
}

/// The ids of all commits of the Body, one on each line.
fn own_commits(request: &LandRequest<'_>, git: &Git) -> Result<String, WorkspaceError> {
    let saved = request.saved;
    let tips = saved.branches.values().chain([&saved.wip, &saved.head]).map(String::as_str);
    Ok(git.line(["rev-list"].into_iter().chain(tips).chain(["--not", &saved.origin]))?)
}

/// The tree of `at` with the difference between two states.
fn merge_states(
    git: &Git,
    from: &BodyState,
    at: &BodyState,
    to: &BodyState,
) -> Result<String, WorkspaceError> {
    if at.tree == from.tree {
        return Ok(to.tree.clone());
    }
    if from.tree == to.tree || at.tree == to.tree {
        return Ok(at.tree.clone());
    }
    merge(git, &from.commit, &at.commit, &to.commit)
}

/// A commit of the Body with the uncommitted work of `base` that the commit lacks. `base` has that work on top of
/// `from`: the user's, when the Body began, or the Body's own, when it last landed. None if git cannot combine them.
fn commit_on_base(
    git: &Git,
    from: &BodyState,
    base: &BodyState,
    commit: &BodyState,
) -> Result<Option<BodyState>, WorkspaceError> {
    if from.tree == base.tree {
        return Ok(Some(commit.clone()));
    }
    if commit.tree == from.tree || commit.tree == base.tree {
        return Ok(Some(base.clone()));
    }
    let below = format!("--merge-base={}", from.commit);
    let merged = git.run([
        "merge-tree",
        "--write-tree",
        "-z",
        "--no-messages",
        "-Xtheirs",
        &below,
        &base.commit,
        &commit.commit,
    ]);
    match merged {
        Ok(said) => wrap_tree(git, &crate::land::first_field(&said)).map(Some),
        // git before 2.44 has no -X for this.
        Err(GitError::Failed { code: Some(1 | 129), .. }) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// A commit without parents that has this tree, because older versions of git merge only commits.
fn wrap_tree(git: &Git, tree: &str) -> Result<BodyState, WorkspaceError> {
    let commit = refs::as_palisade(git.clone()).line(["commit-tree", tree, "-m", "state"])?;
    Ok(BodyState { commit, tree: tree.to_owned() })
}
