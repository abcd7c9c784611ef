//! Sub-agents: parallel work that is merged, conflicts, roles that only read, budgets, and crashes.

use bridge::DriveEnd;
use proto::{
    AgentId, BodyId,
    event_data::{
        AgentBudget, AgentPause, ApprovalAsked, ApprovalDecision, ApprovalGiven, ApprovalMode, ApprovalScope,
        MergeOutcome, SubagentEnded, SubagentStarted, WorkMerged,
    },
};
use testkit::{Bodies, body_test};

use crate::{repo::HostRepo, world::World};

/// Two programmers at once, each with one commit.
pub const TWO: &str = r#"
[[turns]]
calls = [
  { tool = "task", arguments = { description = "make left", subagent_type = "programmer" } },
  { tool = "task", arguments = { description = "make right", subagent_type = "programmer" } },
]
[[turns]]
expect = ["left is done", "right is done"]
text = "all done"

[[turns]]
role = "programmer"
task = "left"
calls = [{ tool = "execute", arguments = { command = "echo left > left && git add left && git commit -qm left && ls" } }]
[[turns]]
role = "programmer"
task = "left"
text = "left is done"

[[turns]]
role = "programmer"
task = "right"
calls = [{ tool = "execute", arguments = { command = "echo right > right && git add right && git commit -qm right && ls" } }]
[[turns]]
role = "programmer"
task = "right"
text = "right is done"
"#;

pub async fn log_of(t: &Bodies, body: &BodyId) -> Vec<String> {
    let subjects = t.sh(body, "git log --no-merges --format=%s").await.ok();
    let mut subjects: Vec<String> = subjects.lines().map(str::to_owned).collect();
    subjects.sort();
    subjects
}

#[body_test(except(user = "what it shows does not depend on who runs it", microvm = "it forks many Bodies"))]
async fn parallel_work_of_sub_agents_is_merged(t: Bodies) {
    let host = HostRepo::plain(&t);
    let body = host.body(&t).await;
    let world = World::new(&t, TWO);
    let agent = world.finish(&body).await;
    assert_eq!(t.sh(&body, "cat left right; git status --porcelain").await.ok(), "left\nright");
    assert_eq!(log_of(&t, &body).await, ["first", "left", "right"]);
    // Each saw only its own work, and nothing of them is left.
    let started: Vec<SubagentStarted> = world.events_of(&agent);
    assert_eq!(started.len(), 2);
    for child in &started {
        assert!(!world.exists(&child.body), "{} was removed", child.body);
        let said = world.conversation(&child.agent).await;
        assert!(!(said.contains("left\\n") && said.contains("right\\n")), "{said}");
        let merged: Vec<WorkMerged> = world.events_of(&child.agent);
        assert_eq!(merged.iter().map(|one| &one.outcome).collect::<Vec<_>>(), [&MergeOutcome::Merged]);
    }
    assert_eq!(world.bodies(), std::slice::from_ref(&body));
    let refs = host.git(&["for-each-ref", "--format=%(refname)", "refs/palisade"]);
    assert!(refs.lines().all(|name| name.contains(body.as_str())), "{refs}");
    // The answers of the sub-agents count for the agent: two of its own, two of each.
    let ended: Vec<SubagentEnded> = world.events_of(&agent);
    assert_eq!(ended.iter().map(|one| one.answers).collect::<Vec<_>>(), [2, 2]);
    assert_eq!(world.view(&agent).await.totals.answers, 6);
    let said = world.conversation(&agent).await;
    assert!(said.contains("commits are merged into your branch. Changed files: left"), "{said}");
}

#[body_test(except(user = "what it shows does not depend on who runs it", microvm = "it forks many Bodies"))]
async fn uncommitted_work_of_the_parent_stays_and_gets_the_changes(t: Bodies) {
    let host = HostRepo::plain(&t);
    let body = host.body(&t).await;
    t.sh(&body, "sed -i 1s/.*/mine/ numbers; echo new > untracked").await.ok();
    let world = World::new(&t, TWO);
    world.finish(&body).await;
    assert_eq!(
        t.sh(&body, "head -1 numbers; cat untracked left right; git log --format=%s; git status --porcelain")
            .await
            .ok(),
        "mine\nnew\nleft\nright\nfirst\n M numbers\n?? left\n?? right\n?? untracked"
    );
    assert_eq!(world.bodies(), [body]);
}

#[body_test(except(user = "what it shows does not depend on who runs it", microvm = "it forks many Bodies"))]
async fn a_conflict_changes_nothing_and_names_the_commits(t: Bodies) {
    let host = HostRepo::plain(&t);
    let body = host.body(&t).await;
    let script = TWO
        .replace("echo left > left && git add left", "sed -i 1s/.*/left/ numbers && git add numbers")
        .replace("echo right > right && git add right", "sed -i 1s/.*/right/ numbers && git add numbers")
        .replace(
            r#"expect = ["left is done", "right is done"]"#,
            r#"expect = ["Conflict: you and the sub-agent changed the same lines of numbers", "git merge task/"]"#,
        );
    let world = World::new(&t, &script);
    let agent = world.finish(&body).await;
    let mut outcomes = Vec::new();
    for child in world.events_of::<SubagentStarted>(&agent) {
        let merged = world.events_of::<WorkMerged>(&child.agent).remove(0);
        outcomes.push((merged.outcome, child));
    }
    outcomes.sort_by_key(|(outcome, _)| *outcome == MergeOutcome::Conflict);
    let [(MergeOutcome::Merged, first), (MergeOutcome::Conflict, second)] = outcomes.as_slice() else {
        panic!("{outcomes:?}")
    };
    let word = |role: &AgentId| {
        let title = world.agents().get(role).unwrap().spec.title;
        title.trim_start_matches("make ").to_owned()
    };
    let look = "head -1 numbers; git status --porcelain; ls .git/MERGE_HEAD 2>/dev/null; true";
    assert_eq!(t.sh(&body, look).await.ok(), word(&first.agent), "the first one is merged, and nothing else");
    assert!(!world.exists(&first.body) && world.exists(&second.body), "the Body with the conflict is kept");
    let shown = format!("git show refs/remotes/task/{}:numbers | head -1", second.body);
    assert_eq!(t.sh(&body, &shown).await.ok(), word(&second.agent), "the model can merge it itself");
    let merge =
        format!("git merge -q -X theirs --no-edit task/{} >/dev/null && head -1 numbers", second.body);
    assert_eq!(t.sh(&body, &merge).await.ok(), word(&second.agent));
}

#[body_test(except(user = "what it shows does not depend on who runs it", microvm = "it forks many Bodies"))]
async fn a_role_that_reads_cannot_write_and_one_that_works_can(t: Bodies) {
    let host = HostRepo::plain(&t);
    let body = host.body(&t).await;
    let place = t.sh(&body, "pwd").await.ok();
    let script = |role: &str| {
        format!(
            r#"
            [[turns]]
            calls = [{{ tool = "task", arguments = {{ description = "write it", subagent_type = "{role}" }} }}]
            [[turns]]
            text = "done"
            [[turns]]
            role = "{role}"
            task = "write it"
            calls = [
              {{ tool = "execute", arguments = {{ command = "echo shell > by-shell; cat by-shell numbers | head -2" }} }},
              {{ tool = "write_file", arguments = {{ file_path = "{place}/by-tool", content = "tool" }} }},
              {{ tool = "task", arguments = {{ description = "write for me", subagent_type = "programmer" }} }},
            ]
            [[turns]]
            role = "{role}"
            task = "write it"
            expect = ["shell\n1"]
            text = "tried"
            [[turns]]
            role = "programmer"
            task = "write for me"
            calls = [{{ tool = "execute", arguments = {{ command = "echo other > by-other" }} }}]
            [[turns]]
            role = "programmer"
            task = "write for me"
            text = "wrote"
            "#
        )
    };
    let look = "ls by-shell by-tool by-other 2>/dev/null; true";
    let world = World::new(&t, &script("searcher"));
    let agent = world.finish(&body).await;
    assert_eq!(t.sh(&body, look).await.ok(), "", "a searcher changed nothing");
    assert_eq!(world.bodies(), std::slice::from_ref(&body));
    let searcher = &world.children(&agent)[0];
    let said = world.conversation(&searcher.spec.id).await;
    assert!(
        said.contains("this agent only reads") && said.contains("write_file is not a valid tool"),
        "{said}"
    );
    assert!(said.contains("not allowed in plan mode") || said.contains("task is not a valid tool"), "{said}");
    let world = World::new(&t, &script("programmer"));
    world.finish(&body).await;
    assert_eq!(t.sh(&body, look).await.ok(), "by-other\nby-shell\nby-tool", "a programmer can do all of it");
}

#[body_test(except(user = "what it shows does not depend on who runs it", microvm = "it forks many Bodies"))]
async fn sub_agents_spend_the_budget_of_their_parent(t: Bodies) {
    let body = t.create().await;
    let script = r#"
        [[turns]]
        calls = [
          { tool = "task", arguments = { description = "one", subagent_type = "general-purpose" } },
          { tool = "task", arguments = { description = "two", subagent_type = "general-purpose" } },
          { tool = "task", arguments = { description = "three", subagent_type = "general-purpose" } },
        ]
        [[turns]]
        text = "done"
        repeat = "forever"
        [[turns]]
        role = "general-purpose"
        calls = [{ tool = "execute", arguments = { command = "date +%s%N" } }]
        repeat = "forever"
    "#;
    let world = World::new(&t, script);
    let agent = world.agent(&body, AgentBudget { turns: Some(10), ..AgentBudget::default() });
    let end = world.drive(&agent).await;
    assert!(matches!(&end, DriveEnd::Paused { reason: AgentPause::Budget, .. }), "{end:?}");
    // Each of three may have asked once more than the rest, because they ask at the same time.
    let answers = world.view(&agent).await.totals.answers;
    assert!((10..=12).contains(&answers), "{answers}");
    let ended: Vec<SubagentEnded> = world.events_of(&agent);
    assert_eq!(ended.len(), 3);
    assert_eq!(ended.iter().map(|one| one.answers).sum::<u64>() + 1, answers);
    // A larger budget lets the parent go on.
    let more = proto::event_data::AgentBudgeted {
        budget: AgentBudget { turns: Some(20), ..AgentBudget::default() },
    };
    world.agents().note(&agent, [more.into()]).unwrap();
    assert_eq!(world.drive(&agent).await, DriveEnd::Finished);
}

#[body_test(except(user = "what it shows does not depend on who runs it", microvm = "it forks many Bodies"))]
async fn agents_stand_at_most_three_deep(t: Bodies) {
    let body = t.create().await;
    let script = r#"
        [[turns]]
        calls = [{ tool = "task", arguments = { description = "go deeper", subagent_type = "general-purpose" } }]
        [[turns]]
        text = "done"
        [[turns]]
        role = "general-purpose"
        calls = [{ tool = "task", arguments = { description = "go deeper", subagent_type = "general-purpose" } }]
        [[turns]]
        role = "general-purpose"
        text = "that was deep"
    "#;
    let world = World::new(&t, script);
    let mut agent = world.finish(&body).await;
    for depth in 1..=3 {
        let children = world.children(&agent);
        assert_eq!(children.len(), 1, "depth {depth}");
        assert_eq!(children[0].spec.parent.as_ref().map(|parent| parent.depth), Some(depth));
        agent = children[0].spec.id.clone();
    }
    assert!(world.children(&agent).is_empty());
    assert!(world.conversation(&agent).await.contains("task is not a valid tool"));
    assert_eq!(world.bodies(), [body]);
}

#[body_test(except(user = "what it shows does not depend on who runs it", microvm = "it forks many Bodies"))]
async fn an_interrupted_call_pauses_its_sub_agents_and_counts_them(t: Bodies) {
    let body = t.create().await;
    let script = r#"
        [[turns]]
        calls = [{ tool = "task", arguments = { description = "slow", subagent_type = "general-purpose" } }]
        [[turns]]
        text = "done"
        [[turns]]
        role = "general-purpose"
        calls = [{ tool = "execute", arguments = { command = "touch /tmp/began; sleep 60" } }]
    "#;
    let world = World::new(&t, script);
    let agent = world.agent(&body, AgentBudget::default());
    let person = async {
        loop {
            let started: Vec<SubagentStarted> = world.events_of(&agent);
            if let Some(child) = started.first()
                && t.sh(&child.body, "ls /tmp/began 2>/dev/null").await.code == 0
            {
                break;
            }
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
        world.agents().note(&agent, [proto::event_data::AgentInterrupted { stop: false }.into()]).unwrap();
    };
    let (end, ()) = tokio::join!(world.drive(&agent), person);
    assert!(matches!(&end, DriveEnd::Paused { reason: AgentPause::Interrupted, .. }), "{end:?}");
    let child = &world.children(&agent)[0].spec.id;
    let status = world.view(child).await.status();
    assert!(
        matches!(&status, bridge::AgentStatus::Paused { reason: AgentPause::Interrupted, .. }),
        "{status:?}"
    );
    let ended: Vec<SubagentEnded> = world.events_of(&agent);
    assert_eq!(ended.iter().map(|one| one.answers).collect::<Vec<_>>(), [1]);
    assert_eq!(world.view(&agent).await.totals.answers, 2);
}

#[body_test(except(user = "what it shows does not depend on who runs it", microvm = "it forks many Bodies"))]
async fn a_sub_agent_that_needs_approval_waits_for_a_person(t: Bodies) {
    let repo = HostRepo::plain(&t);
    let body = repo.body(&t).await;
    let script = r#"
        [[turns]]
        calls = [{ tool = "task", arguments = { description = "make left", subagent_type = "programmer" } }]
        [[turns]]
        expect = ["left is done"]
        text = "all done"
        [[turns]]
        role = "programmer"
        calls = [{ tool = "execute", arguments = { command = "echo left > left" } }]
        [[turns]]
        role = "programmer"
        text = "left is done"
    "#;
    let world = World::new(&t, script);
    let agent = world.agent_in_mode(&body, AgentBudget::default(), ApprovalMode::Ask);
    let end = world.drive(&agent).await;
    assert!(matches!(&end, DriveEnd::Paused { reason: AgentPause::Approval, .. }), "{end:?}");
    let approve = |id: &AgentId, call: &str| {
        let given = ApprovalGiven {
            call: call.to_owned(),
            decision: ApprovalDecision::Approve,
            arguments: None,
            message: None,
            scope: ApprovalScope::Once,
        };
        world.agents().note(id, [given.into()]).unwrap();
    };
    approve(&agent, "call_main_1_1");
    let person = async {
        loop {
            let waiting = world
                .children(&agent)
                .into_iter()
                .find(|child| !world.events_of::<ApprovalAsked>(&child.spec.id).is_empty());
            if let Some(child) = waiting {
                assert_eq!(t.sh(&body, "ls left 2>/dev/null").await.text(), "", "it waits");
                approve(&child.spec.id, "call_programmer_1_1");
                return;
            }
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
    };
    let (end, ()) = tokio::join!(world.drive(&agent), person);
    assert_eq!(end, DriveEnd::Finished, "{}", world.conversation(&agent).await);
    assert_eq!(t.sh(&body, "cat left").await.ok(), "left");
}
