"""Adaptive RAG after LangGraph's tutorial: a router on START, a grader of documents, and graders that route."""

from typing import Literal, TypedDict

from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph
from pydantic import BaseModel, Field

llm = ChatOpenAI(model="gpt-4o-mini", temperature=0)

DOCUMENTS = {
    "owl": ["An owl hunts at night.", "A bee dances."],
    "bee": ["A bee dances.", "An owl hunts at night."],
}


class RouteQuery(BaseModel):
    """Where to look."""

    datasource: Literal["vectorstore", "web_search"] = Field(description="Where the answer is likely to be.")


class Grade(BaseModel):
    """A verdict."""

    binary_score: Literal["yes", "no"] = Field(description="'yes' or 'no'.")


def chain(system, human, schema):
    prompt = ChatPromptTemplate.from_messages([("system", system), ("human", human)])
    return prompt | llm.with_structured_output(schema)


question_router = chain("You route a question: the vectorstore is about animals.", "{question}", RouteQuery)
retrieval_grader = chain("You grade whether a document is relevant.", "{document}\n\n{question}", Grade)
hallucination_grader = chain("You grade whether an answer is grounded.", "{documents}\n\n{generation}", Grade)
answer_grader = chain("You grade whether an answer resolves a question.", "{question}\n\n{generation}", Grade)
rag_chain = ChatPromptTemplate.from_template("Answer from this only: {context}\n\n{question}") | llm
question_rewriter = ChatPromptTemplate.from_template("Rewrite for a search: {question}") | llm


class GraphState(TypedDict):
    question: str
    generation: str
    documents: list[str]


def retrieve(state: GraphState):
    question = state["question"]
    documents = [text for word, texts in DOCUMENTS.items() if word in question for text in texts]
    return {"documents": documents, "question": question}


def web_search(state: GraphState):
    return {"documents": [f"The web says much of {state['question']}"], "question": state["question"]}


def grade_documents(state: GraphState):
    question = state["question"]
    relevant_documents = []
    for document in state["documents"]:
        score = retrieval_grader.invoke({"question": question, "document": document})
        if score.binary_score == "yes":
            relevant_documents.append(document)
    return {"documents": relevant_documents, "question": question}


def generate(state: GraphState):
    question, documents = state["question"], state["documents"]
    generation = rag_chain.invoke({"context": documents, "question": question})
    return {"documents": documents, "question": question, "generation": generation.text}


def transform_query(state: GraphState):
    better_question = question_rewriter.invoke({"question": state["question"]})
    return {"documents": state["documents"], "question": better_question.text}


def route_question(state: GraphState):
    return question_router.invoke({"question": state["question"]}).datasource


def decide_to_generate(state: GraphState):
    return "generate" if state["documents"] else "transform_query"


def grade_generation(state: GraphState):
    documents, generation = state["documents"], state["generation"]
    if hallucination_grader.invoke({"documents": documents, "generation": generation}).binary_score == "no":
        return "not supported"
    score = answer_grader.invoke({"question": state["question"], "generation": generation})
    return "useful" if score.binary_score == "yes" else "not useful"


workflow = StateGraph(GraphState)
for node in (web_search, retrieve, grade_documents, generate, transform_query):
    workflow.add_node(node.__name__, node)
workflow.add_conditional_edges(START, route_question, {"web_search": "web_search", "vectorstore": "retrieve"})
workflow.add_edge("web_search", "generate")
workflow.add_edge("retrieve", "grade_documents")
workflow.add_conditional_edges("grade_documents", decide_to_generate, ["transform_query", "generate"])
workflow.add_edge("transform_query", "retrieve")
workflow.add_conditional_edges(
    "generate", grade_generation, {"not supported": "generate", "useful": END, "not useful": "transform_query"}
)
graph = workflow.compile()

tasks = [{"id": f"{word}-{n}", "question": f"What does an {word} do? ({n})"} for word in DOCUMENTS for n in range(6)]


def reward(task, state):
    return float("night" in state["generation"] or "dances" in state["generation"])
