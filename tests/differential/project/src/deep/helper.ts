export const answer = 42; // TODO: ask for the question
