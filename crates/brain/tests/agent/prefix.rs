//! The prefix of requests: between two summaries every request begins with the one before, whatever happens.

use std::{collections::BTreeSet, sync::Arc};

use brain::{
    agent::{
        AgentView, Middleware,
        middleware::{AgentFiles, MessageEviction, ResultEviction, Summarizer},
    },
    model::{ContentBlock, ModelRequest, Speaker},
};
use proptest::prelude::*;
use proto::event_data::{ApprovalMode, DecodedEvent, EventData};

use crate::world::{MemoryFiles, World};

/// One answer of the model.
#[derive(Debug, Clone)]
enum Step {
    Calls(Vec<&'static str>),
    Text,
    Cut,
    Empty,
    RateLimit,
}

/// Something that a person or the host does after some events.
#[derive(Debug, Clone)]
enum Disturbance {
    Kill,
    Message,
}

fn step() -> impl Strategy<Value = Step> {
    let tool = prop_oneof![Just("look"), Just("work"), Just("fail"), Just("nothing"), Just("invalid")];
    prop_oneof![
        6 => prop::collection::vec(tool, 1..4).prop_map(Step::Calls),
        1 => Just(Step::Text),
        1 => Just(Step::Cut),
        1 => Just(Step::Empty),
        1 => Just(Step::RateLimit),
    ]
}

fn script(steps: &[Step]) -> String {
    let mut text =
        String::from("[[turns]]\nrole = \"summarizer\"\ntext = \"what happened\"\nrepeat = \"forever\"\n");
    for (number, step) in steps.iter().enumerate() {
        text.push_str("[[turns]]\n");
        text.push_str(&match step {
            Step::Calls(tools) => {
                let calls: Vec<String> = tools
                    .iter()
                    .map(|tool| match *tool {
                        "invalid" => "{ tool = \"work\", arguments = \"no json\" }".to_owned(),
                        tool => format!("{{ tool = \"{tool}\", arguments = {{ path = \"/{number}\" }} }}"),
                    })
                    .collect();
                format!("text = \"turn {number}\"\ncalls = [{}]\n", calls.join(", "))
            }
            Step::Text => format!("text = \"turn {number}\"\n"),
            Step::Cut => format!("text = \"turn {number}\"\nstop = \"max_tokens\"\n"),
            Step::Empty => "text = \"\"\n".to_owned(),
            Step::RateLimit => format!("text = \"turn {number}\"\nfault = \"429\"\ntimes = 1\n"),
        });
    }
    text.push_str("[[turns]]\ntext = \"the end\"\nrepeat = \"forever\"\n");
    text
}

/// The blocks of a request in the order in which a cache sees them, each with its speaker.
fn blocks(request: &ModelRequest) -> Vec<String> {
    let messages = request.messages.iter();
    messages
        .flat_map(|message| {
            message
                .blocks
                .iter()
                .map(move |block| format!("{:?} {}", message.speaker, serde_json::to_string(block).unwrap()))
        })
        .collect()
}

/// Every call of an answer has exactly one result in the message after it, in the order of the calls.
fn check_pairs(request: &ModelRequest) -> Result<(), TestCaseError> {
    for (index, message) in request.messages.iter().enumerate() {
        let ids = |blocks: &[ContentBlock]| -> Vec<String> {
            let id = |block: &ContentBlock| match block {
                ContentBlock::ToolCall(call) => Some(call.id.clone()),
                ContentBlock::ToolResult(result) => Some(result.call_id.clone()),
                _ => None,
            };
            blocks.iter().filter_map(id).collect()
        };
        if message.speaker == Speaker::Assistant {
            let after = request.messages.get(index + 1).map(|next| ids(&next.blocks)).unwrap_or_default();
            prop_assert_eq!(ids(&message.blocks), after);
        } else if index == 0 || request.messages[index - 1].speaker == Speaker::User {
            prop_assert!(index == 0, "two messages of the user in a row");
            prop_assert!(ids(&message.blocks).is_empty(), "a result without a call");
        }
    }
    Ok(())
}

fn extend_world(world: &mut World, window_tokens: u64) {
    let files = Arc::new(MemoryFiles::default());
    world.extension = Some(Box::new(move |parts, _| {
        let files = Arc::clone(&files) as Arc<dyn AgentFiles>;
        let model = Arc::clone(&parts.model);
        parts.middleware.push(Arc::new(MessageEviction::new(Arc::clone(&files), "/h")));
        parts.middleware.push(Arc::new(Summarizer::new(
            model,
            Arc::clone(&files),
            Some(window_tokens),
            "/h/old.md",
        )));
        parts.middleware.push(Arc::new(ResultEviction::new(files, "/r")));
    }));
}

/// Runs a script with disturbances, and returns the requests of the agent.
async fn run(
    steps: &[Step],
    window: u64,
    disturbances: &[(usize, Disturbance)],
) -> (World, Vec<ModelRequest>) {
    let mut world = World::new(&script(steps), ApprovalMode::Auto);
    extend_world(&mut world, window);
    for (number, (events, disturbance)) in disturbances.iter().enumerate() {
        let now = world.journal.events().len();
        *world.journal.events_max.lock().unwrap() = now + events;
        let _ = world.drive().await;
        if let Disturbance::Message = disturbance {
            let long = if number % 2 == 0 { "y".repeat(300) } else { String::new() };
            world.say(&format!("message {number} {long}"));
        }
    }
    *world.journal.events_max.lock().unwrap() = usize::MAX;
    let _ = world.drive().await;
    let requests = world.requests.lock().unwrap().clone();
    let own = requests.into_iter().filter(|request| request.role.is_none()).collect();
    (world, own)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn each_request_begins_with_the_one_before(
        steps in prop::collection::vec(step(), 1..10),
        window in prop_oneof![Just(1_000_000_u64), Just(130_u64)],
        disturbances in prop::collection::vec(
            (2..12_usize, prop_oneof![Just(Disturbance::Kill), Just(Disturbance::Message)]), 0..4),
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        let (world, requests) = runtime.block_on(run(&steps, window, &disturbances));
        prop_assert!(!requests.is_empty());
        for request in &requests {
            check_pairs(request)?;
        }
        for pair in requests.windows(2) {
            prop_assert_eq!(&pair[0].system, &pair[1].system);
            prop_assert_eq!(&pair[0].tools, &pair[1].tools);
            let (before, after) = (blocks(&pair[0]), blocks(&pair[1]));
            let is_summary = after.first().is_some_and(|block| block.contains("has been summarized"))
                && after.first() != before.first();
            prop_assert!(is_summary || after.starts_with(&before), "{:#?}\n{:#?}", before, after);
        }
        let summaries = requests.windows(2).filter(|pair| !blocks(&pair[1]).starts_with(&blocks(&pair[0]))).count();
        prop_assert!(window < 1_000_000 || summaries == 0);
        let events = world.journal.events();
        let compacted = events.iter().filter(|event| event.kind == "history.compacted").count();
        prop_assert!(summaries <= compacted);
    }
}

/// Puts a clock into each request: the mistake that the property is about.
struct Clock;

impl Middleware for Clock {
    fn name(&self) -> &'static str {
        "clock"
    }

    fn shape(&self, view: &AgentView, request: &mut ModelRequest) {
        let text = format!("it is turn {}", view.turn);
        if let Some(first) = request.messages.first_mut() {
            first.blocks.insert(0, ContentBlock::text(text));
        }
    }
}

#[tokio::test]
async fn the_property_notices_a_request_that_changes() {
    let steps = vec![Step::Calls(vec!["look"]); 3];
    let mut world = World::new(&script(&steps), ApprovalMode::Auto);
    world.extension = Some(Box::new(|parts, _| parts.middleware.push(Arc::new(Clock))));
    world.drive().await.unwrap();
    let requests = world.requests.lock().unwrap();
    assert_eq!(requests.len(), 4);
    assert!(!requests.windows(2).any(|pair| blocks(&pair[1]).starts_with(&blocks(&pair[0]))));
}

#[tokio::test]
async fn summaries_shorten_the_conversation_and_keep_files() {
    let steps = vec![Step::Calls(vec!["look", "work"]); 24];
    let (world, requests) = run(&steps, 220, &[]).await;
    assert_eq!(world.view().await.summary.as_deref(), Some("the end"));
    let compactions: Vec<_> = world
        .journal
        .events()
        .iter()
        .filter_map(|event| match event.decode() {
            DecodedEvent::Known(EventData::HistoryCompacted(data)) => Some(data),
            _ => None,
        })
        .collect();
    assert!(compactions.len() >= 2, "{}", compactions.len());
    let files: BTreeSet<_> = compactions.iter().filter_map(|data| data.file.clone()).collect();
    assert_eq!(files.len(), compactions.len(), "each summary has a file of its own");
    assert!(compactions.iter().all(|data| data.summary.contains("what happened") && data.usage.is_some()));
    let longest = requests.iter().map(|request| request.messages.len()).max().unwrap();
    assert!(longest < 40, "{longest}");
}
