// Puts the drawing in place, shows hover texts, lights up everything that belongs to one request,
// and reports clicks: {request: place in the order of arrival} or {step: number}.
export default function ({ parentElement, data, setTriggerValue }) {
  const stage = parentElement.querySelector(".stage");
  stage.innerHTML = data.html; // made by lab_app.drawing, which escapes every text of the log
  const tip = document.createElement("div");
  tip.className = "tip";
  stage.append(tip);
  if (data.selected !== null)
    stage.querySelectorAll(`[data-r~="${Number(data.selected)}"]`).forEach((el) => el.classList.add("sel"));

  const light = (places) => {
    stage.querySelectorAll(".hot").forEach((el) => el.classList.remove("hot"));
    stage.classList.toggle("hovering", places.length > 0);
    for (const place of places)
      stage.querySelectorAll(`[data-r~="${Number(place)}"]`).forEach((el) => el.classList.add("hot"));
  };
  const stepAt = (axis, event) => {
    const [first, count] = axis.dataset.axis.split(",").map(Number);
    const box = axis.getBoundingClientRect();
    const place = Math.floor(((event.clientX - box.left) / box.width) * count);
    return first + Math.min(Math.max(place, 0), count - 1);
  };

  stage.onmouseover = (event) => {
    const owner = event.target.closest("[data-r]");
    light(owner ? owner.dataset.r.split(" ") : []);
    const told = event.target.closest("[data-tip]");
    tip.style.display = told && told.dataset.tip ? "block" : "none";
    if (told) tip.textContent = told.dataset.tip;
  };
  stage.onmousemove = (event) => {
    if (tip.style.display !== "block") return;
    const box = stage.getBoundingClientRect();
    const left = Math.min(event.clientX - box.left + 14, box.width - tip.offsetWidth - 4);
    const below = event.clientY - box.top + 18;
    const over = below + tip.offsetHeight > box.height;
    tip.style.left = `${Math.max(left, 0)}px`;
    tip.style.top = `${over ? below - tip.offsetHeight - 30 : below}px`;
  };
  stage.onmouseleave = () => { light([]); tip.style.display = "none"; };
  stage.onclick = (event) => {
    const axis = event.target.closest("[data-axis]");
    const owner = event.target.closest("[data-r]");
    if (axis) setTriggerValue("pick", { step: stepAt(axis, event) });
    else if (owner) setTriggerValue("pick", { request: Number(owner.dataset.r.split(" ")[0]) });
  };
}
