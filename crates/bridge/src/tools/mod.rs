//! The tools of an agent: those of Deep Agents, with its names, parameters and texts, and beside them codex's
//! `exec_command`, `write_stdin` and `apply_patch`, and `ask_user`.
//!
//! Invariant: every act of a tool is in the agent's Body, in another place of the agent's files, or in its own log.
//! Invariant: an error is a text that the model reads; a tool never fails otherwise.
//! Trust: arguments come from a model. They are parsed here, with limits.

mod arguments;
mod ask;
mod command;
mod compact;
mod delete;
mod edit;
mod exec_command;
mod execute;
mod file_tool;
mod glob;
mod grep;
mod image;
mod list;
mod live;
mod output;
mod patch;
mod python;
mod read;
mod session;
mod text;
mod todos;
mod write;

use std::sync::Arc;

use brain::agent::{LiveSink, ToolRegistry};

use file_tool::FilesTool;

use crate::{Workplace, files::CompositeFiles};

/// The tools of an agent that works in this place, with these files. Output of commands goes to `live` while it comes.
pub fn registry(
    workplace: &Arc<Workplace>,
    files: &Arc<CompositeFiles>,
    live: &Arc<dyn LiveSink>,
) -> ToolRegistry {
    let mut tools = ToolRegistry::default();
    tools.add(FilesTool::on_files(list::ListTool, workplace, files));
    tools.add(FilesTool::on_files(read::ReadTool, workplace, files));
    tools.add(FilesTool::on_files(write::WriteTool, workplace, files));
    tools.add(FilesTool::on_files(edit::EditTool, workplace, files));
    tools.add(FilesTool::on_files(delete::DeleteTool, workplace, files));
    tools.add(FilesTool::on_files(glob::GlobTool, workplace, files));
    tools.add(FilesTool::on_files(grep::GrepTool, workplace, files));
    tools.add(Arc::new(patch::PatchTool::new(Arc::clone(workplace), Arc::clone(files))));
    tools.add(Arc::new(execute::ExecuteTool::new(Arc::clone(workplace), Arc::clone(live))));
    let sessions = session::Sessions::new(Arc::clone(workplace.fleet()), workplace.agent().clone());
    let exec = exec_command::ExecCommandTool::new(Arc::clone(workplace), sessions.clone(), Arc::clone(live));
    tools.add(Arc::new(exec));
    let write = exec_command::WriteStdinTool::new(Arc::clone(workplace), sessions, Arc::clone(live));
    tools.add(Arc::new(write));
    tools.add(Arc::new(todos::TodosTool));
    tools.add(Arc::new(compact::CompactTool));
    tools.add(Arc::new(ask::AskTool));
    tools
}
